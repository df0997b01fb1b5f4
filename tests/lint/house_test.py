#!/usr/bin/env python3
"""house_test.py - tests house.py on small texts. Prints TAP."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import house  # noqa: E402

n_run = n_failed = 0


def check(name, got, want):
    global n_run, n_failed
    n_run += 1
    if got == want:
        print('ok %d - %s' % (n_run, name))
        return
    n_failed += 1
    print('not ok %d - %s\n#   got  %r\n#   want %r' % (n_run, name, got, want))


def file(name, text):
    """Returns the source that a file of src/ with this text would be."""
    return house.Source(os.path.join(house.ROOT, 'src', name), text)


def findings(rule, *sources, known=None):
    return [text for _, _, text in getattr(house, 'rule_' + rule)(list(sources), known)]


def body(*lines):
    return 'static void idist__a_f(int x) {\n    ' + '\n    '.join(lines) + '\n}\n'


def one(rule, *lines):
    return len(findings(rule, file('core/a.h', body(*lines))))


def test_reader():
    text = '''typedef struct idist__a_s { int x; } idist__a_t;
enum { IDIST__ONE = 1, IDIST__TWO };
#define IDIST__M(x) \\
    idist__m(x) // a comment, idist__no
static const int64_t idist__v = 3, idist__w[2] IDIST__UNUSED = {1, 2};
static void (*idist__hook)(int);
IDIST__PRINTF(1, 2) static int idist__f(const char *fmt, ...) { return idist__v; }
IDIST__KERNELS(base)
struct idist__later *idist__g(void) {
    return 0;
}
static int idist__p(int);
'''
    source = house.Source('x.h', text)
    names = [name for item in source.items for name in item.names]
    check('names', names, [
        ('idist__a_s', 'type'), ('idist__a_t', 'type'),
        ('IDIST__ONE', 'constant'), ('IDIST__TWO', 'constant'), ('IDIST__M', 'macro'),
        ('idist__v', 'variable'), ('idist__w', 'variable'), ('idist__hook', 'variable'),
        ('idist__f', 'function'), ('idist__g', 'function'), ('idist__p', 'proto')])
    check('comments', [t for _, t, _ in source.comments], ['// a comment, idist__no'])
    brace = house.Source('x.h', 'int f(void) {\n    g("{", \'{\');\n}\n')
    check('a brace in a string', len(brace.functions), 1)
    unclear = house.Source('x.h', 'int f(void) {\n    g()\n}\n')
    check('a body that is not understood', len(unclear.misread), 1)


def test_prefix():
    def found(name, *others):
        text = '// core/low.h: what it is\n// Functions: idist__low_*, idist__deep_*.\n'
        text += 'typedef struct idist__thing {\n    int x;\n} idist__thing;\n'
        return findings('prefix', file('core/low.h', text + 'static void %s(void) {}\n' % name),
                        *others)

    check('the name of the file', found('idist__low_f'), [])
    check('a type of the file', found('idist__thing_f'), [])
    check('what the head adds', found('idist__deep_f'), [])
    check('no prefix', found('idist__other_f'), ['idist__other_f: no file has this prefix'])
    check('a public name', found('idist_low'), [])
    high = file('core/low_high.h', '')
    check('the longest prefix counts', found('idist__low_high_f', high),
          ['idist__low_high_f has the prefix of core/low_high.h'])
    check('a prefix of two files', found('idist__low_f', file('ring/deep.h', '')),
          ['idist__deep_ belongs to core/low.h and ring/deep.h'])
    check('os', findings('prefix', file('os/low.h', 'static void idist__os_any(void) {}\n')), [])


def test_includes():
    low = file('core/low.h', '#pragma once\nstatic void idist__low_f(void) {}\n')
    call = 'static void idist__high_f(void) { idist__low_f(); }\n'
    include = '#pragma once\n#include "core/low.h"\n'
    check('what is used', findings('includes', low, file('core/high.h', include + call)), [])
    check('used and not included',
          findings('includes', low, file('core/high.h', '#pragma once\n' + call)),
          ['idist__low_f is in core/low.h'])
    check('included and not used', findings('includes', low, file('core/high.h', include)),
          ['nothing of core/low.h is used'])
    begin = file('base/begin.h', '#define IDIST__M 1\n')
    check('what is there everywhere', findings('includes', begin, file(
        'core/high.h', '#pragma once\nstatic int idist__high = IDIST__M;\n')), [])
    check('device memory in idist_train.h', findings('includes', file(
        'gpu/low.h', low.text), file('train/high.h', '#pragma once\n' + call)), [])


def test_rules():
    check('two statements', one('statements', 'a(); b();'), 1)
    check('joined by a comma', one('statements', 'if (x) a(), b();'), 1)
    check('for and calls have commas',
          one('statements', 'for (a = 0, b = 1;;) c(a, b);', 'int i, j;'), 0)
    check('case on a line',
          one('statements', 'switch (x) {', 'case 1: a(); break;', 'default: return;', '}'), 0)
    check('chain', one('chain', 'if ((s = f()) != IDIST_OK) return s;'), 1)
    check('no chain', one('chain', 'if (s != IDIST_OK) return s;'), 0)
    four = ['if (a)', 'for (;;)', 'while (b)', 'do']
    check('four levels', one('nesting', *four, 'c();', 'while (d);'), 0)
    check('five levels', one('nesting', *four, 'if (c) d();', 'while (e);'), 1)
    check('else if is no level', one('nesting', *['if (a) b();', 'else'] * 6, 'if (c) d();'), 0)
    check('branches', one('branches', *['if (a && b) c();'] * 13), 1)
    check('length', (one('length', *['a();'] * 60), one('length', *['a();'] * 61)), (0, 1))
    check('declarations', one('decl', 'int a;', *['a();'] * 5), 1)
    check('declarations of a short function', one('decl', 'int a;', *['a();'] * 4), 0)
    check('blank', (one('blank', *['a();'] * 60), one('blank', *(['a();'] * 10 + ['']) * 6)),
          (1, 0))
    check('blank in a short file', one('blank', *['a();'] * 50), 0)
    known = house.Known([file('core/a.h', body('a();'))])
    text = '// idist__a_f, idist__gone and idist__a_* of idist_core.h\n' + body('a();')
    check('comment', findings('comment', file('core/a.h', text), known=known),
          ['no such thing as idist__gone'])


def test_launchers():
    api = '''/*
        Rank and size come from the first of these that is set:

            desc.rank and desc.world_size
        A_RANK, _SIZE            a
        B_RANK, %s
        B_CONFIG
        none of them
        IDIST_LAUNCHER selects one: none, a,
        torchrun, %s.
    */'''
    table = '''static const idist__launcher idist__launchers[] = {
        {IDIST__LAUNCHER_ENV, "a", "A_RANK",
         "A_SIZE", NULL}, {IDIST__LAUNCHER_B, "b", "B_RANK", "B_N", NULL},
        {IDIST__LAUNCHER_B, "b", "B_CONFIG", "B_CONFIG", NULL}};'''

    def both(*words):
        return findings('launchers', file('idist.h', api % words), file('launch/detect.h', table))

    check('launchers as in the table', both('B_N', 'b'), [])
    check('another name', both('B_N', 'c'), ['IDIST_LAUNCHER: the table has none, a, torchrun, b'])
    check('another variable', both('_N', 'b'), [])
    check('another size', both('B_SIZE', 'b'),
          ['the table has A_RANK, A_SIZE; B_RANK, B_N; B_CONFIG, B_CONFIG'])


def test_system():
    def found(text, name='core/a.h'):
        return findings('system', file(name, text))

    check('a lock of the system', found('static pthread_mutex_t idist__a;\n'),
          ['pthread_mutex_t belongs in os/'])
    check('a struct of the system', one('system', 'struct pollfd p;', 'struct idist__stat s;'), 1)
    check('a constant of the system',
          one('system', 'idist__wait(x, POLLIN | IDIST__OS_WRITABLE);'), 1)
    check('a member of the system', one('system', 'x->iov_base = 0;'), 1)
    check('calls of the system',
          one('system', 'write(x, "a", 1);', 'if (fork() == 0) f(getpid());'), 3)
    check('members with such names',
          one('system', 'if (t->write(x) || t.poll(x)) read = write ? open : close;'), 0)
    check('pointers with such names',
          found('struct idist__a {\n    int (*read)(int fd);\n};\n'), [])
    check('a path of the system',
          one('system', 'f("/proc/self/exe");', 'f("see /proc/self/exe");'), 1)
    check('includes',
          found('#include <stdint.h>\n#include "idist.h"\n'
                '#include <sys/mman.h>\n#  include <poll.h>\n'),
          ['<sys/mman.h> belongs in os/', '<poll.h> belongs in os/'])
    check('macros', found('#define IDIST__A(x) \\\n    sched_yield()\n#ifdef __linux__\n#endif\n'),
          ['sched_yield() belongs in os/', '__linux__ belongs in os/'])
    check('comments may', found('// fork(), pthread_mutex_t and POLLIN\n'), [])
    check('C is no system',
          one('system', 'memcpy(a, b, strlen(b));', 'if (errno == EINTR) free(a);'), 0)
    check('in os/', found('#include <poll.h>\n', name='os/a.h'), [])
    mpi = '#include <mpi.h>\n'
    check('a header of its own', (found(mpi, name='idist_mpi.h'), len(found(mpi))), ([], 1))


def test_cancel():
    def found(statement, name='os/a.h'):
        text = 'static void idist__a(int x) {\n    %s\n}\n' % statement
        return findings('cancel', file(name, text))

    check('a cancellation point', found('close(x);'), ['close() without IDIST__OS_CALL'])
    check('after a wrapped one', found('if (IDIST__OS_CALL(read(x, 0, (1))) < 0) close(x);'),
          ['close() without IDIST__OS_CALL'])
    check('wrapped ones', found('while (IDIST__OS_CALL(write(x, 0, f(1))) < 0) continue;'), [])
    check('a member with such a name', found('x->read(x);'), [])
    check('elsewhere', found('close(x);', name='core/a.h'), [])


def test_locale():
    check('a number with a fraction', one('locale', 'f("%.*g of %5.2f", x);', 'g(atof(x));'), 3)
    check('other formats', one('locale', 'f("%d %s %% %zu%%eth0 100 % fine", x);'), 0)
    text = body('f("%g", strtod(x));')
    check('where it is allowed', findings('locale', file('base/text.h', text)), [])


for test in (test_reader, test_prefix, test_includes, test_rules, test_launchers, test_system,
             test_cancel, test_locale):
    test()
print('1..%d' % n_run)
sys.exit(n_failed > 0)
