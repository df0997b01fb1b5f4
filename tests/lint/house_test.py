#!/usr/bin/env python3
"""house_test.py - tests of house.py on small texts. Prints TAP."""
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import house  # noqa: E402

BANNER = house.DASHES + '\n// [%s]  what it is\n// uses %s\n' + house.DASHES + '\n\n'
n_run = n_failed = 0


def check(name, got, want):
    global n_run, n_failed
    n_run += 1
    if got == want:
        print('ok %d - %s' % (n_run, name))
        return
    n_failed += 1
    print('not ok %d - %s\n#   got  %r\n#   want %r' % (n_run, name, got, want))


def make(*texts, name='idist_core.h'):
    """A house of one header, whose sections are given as (tag, uses, code)."""
    text = ''.join(BANNER % (tag, uses) + code for tag, uses, code in texts)
    return house.House([house.Source(name, text)])


def findings(rule, building, known=None):
    return [text for _, _, text in getattr(house, 'rule_' + rule)(building, known)]


def body(*lines):
    return 'static void idist__a_f(int x) {\n    ' + '\n    '.join(lines) + '\n}\n'


def one(rule, *lines):
    return len(findings(rule, make(('core:a', '-', body(*lines)))))


def refuses(do):
    try:
        do()
    except house.Refused:
        return True
    return False


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


def test_graph():
    low = ('core:low', '-', 'static void idist__low_f(void) {}\n')
    high = ('core:high', 'low', 'static void idist__high_f(void) { idist__low_f(); }\n')
    check('uses are true', findings('uses', make(low, high)), [])
    check('uses are false', findings('uses', make(low, high[:1] + ('-',) + high[2:])),
          ['[core:high] uses low'])
    check('a uses line without a section',
          findings('uses', make(low, high[:1] + (high[1] + '\n// uses',) + high[2:])),
          ['[core:high] uses low'])
    check('no way up', findings('floors', make(low, high)), [])
    call = ('core:low', '-', 'static void idist__high_f(void);\n'
                             'static void idist__low_f(void) { idist__high_f(); }\n')
    both = make(call, high)
    check('a call up', findings('floors', both),
          ['idist__low_f of [core:low] uses idist__high_f of [core:high]'])
    check('a circle', [[s.name for s in c] for c in both.circles()], [['low', 'high']])
    opaque = ('core:low', '-', 'typedef struct idist__t idist__t;\n'
                               'static void idist__low_f(idist__t *t);\n')
    struct = ('core:b', '-', 'struct idist__t {\n    int x;\n};\n')
    check('an opaque type', findings('floors', make(opaque, struct)), [])
    strange = ('core:low', '-', 'static void idist__other(void) {}\n')
    check('prefix', findings('prefix', make(strange)), ['[core:low] has idist__other'])
    check('banner', findings('banner', make(('ring:low', '-', ''))),
          ['[ring:low] is not named after its file'])
    other = house.Source('idist_ring.h', BANNER % ('ring:low', 'core:low') +
                         'static void idist__low_g(void) { idist__low_f(); }\n')
    two = house.House([other, make(low).sources[0]])
    check('sections of one name', [two.uses_text(s) for s in two.sections],
          [['// uses -'], ['// uses core:low']])
    check('files by floor', [s.name for s in two.sources], ['idist_core.h', 'idist_ring.h'])


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
    check('blank', (one('blank', *['a();'] * 12), one('blank', *['a();'] * 10 + ['', 'b();'])),
          (1, 0))
    known = house.Known(make(('core:a', '-', body('a();'))))
    text = ('core:a', '-',
            '// idist__a_f, idist__gone and idist__a_* of idist_core.h\n' + body('a();'))
    check('comment', findings('comment', make(text), known), ['no such thing as idist__gone'])


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
        return findings('launchers', house.House([house.Source('idist.h', api % words),
                                                  house.Source('idist_launch.h', table)]))

    check('launchers as in the table', both('B_N', 'b'), [])
    check('another name', both('B_N', 'c'), ['IDIST_LAUNCHER: the table has none, a, torchrun, b'])
    check('another variable', both('_N', 'b'), [])
    check('another size', both('B_SIZE', 'b'),
          ['the table has A_RANK, A_SIZE; B_RANK, B_N; B_CONFIG, B_CONFIG'])


def test_system():
    def found(text, name='idist_core.h'):
        return findings('system', make(('core:a', '-', text), name=name))

    check('a lock of the system', found('static pthread_mutex_t idist__a;\n'),
          ['pthread_mutex_t belongs in idist_os.h'])
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
          ['<sys/mman.h> belongs in idist_os.h', '<poll.h> belongs in idist_os.h'])
    check('macros', found('#define IDIST__A(x) \\\n    sched_yield()\n#ifdef __linux__\n#endif\n'),
          ['sched_yield() belongs in idist_os.h', '__linux__ belongs in idist_os.h'])
    check('comments may', found('// fork(), pthread_mutex_t and POLLIN\n'), [])
    check('C is no system',
          one('system', 'memcpy(a, b, strlen(b));', 'if (errno == EINTR) free(a);'), 0)
    check('in idist_os.h', found('#include <poll.h>\n', name='idist_os.h'), [])
    mpi = '#include <mpi.h>\n'
    check('a header of its own', (found(mpi, name='idist_mpi.h'), len(found(mpi))), ([], 1))


def test_cancel():
    def found(statement, name='idist_os.h'):
        text = 'static void idist__a(int x) {\n    %s\n}\n' % statement
        return findings('cancel', make(('os:a', '-', text), name=name))

    check('a cancellation point', found('close(x);'), ['close() without IDIST__OS_CALL'])
    check('after a wrapped one', found('if (IDIST__OS_CALL(read(x, 0, (1))) < 0) close(x);'),
          ['close() without IDIST__OS_CALL'])
    check('wrapped ones', found('while (IDIST__OS_CALL(write(x, 0, f(1))) < 0) continue;'), [])
    check('a member with such a name', found('x->read(x);'), [])
    check('elsewhere', found('close(x);', name='idist_core.h'), [])


def test_locale():
    check('a number with a fraction', one('locale', 'f("%.*g of %5.2f", x);', 'g(atof(x));'), 3)
    check('other formats', one('locale', 'f("%d %s %% %zu%%eth0 100 % fine", x);'), 0)
    text = body('f("%g", strtod(x));')
    check('where it is allowed', findings('locale', make(('base:number', '-', text))), [])


def test_space():
    before = body('int a = x;', 'first(a);',
                  'if (a) {', '    b();', '}', 'else {', '    c();', '    d();', '}',
                  '// about e', 'e();', 'a = f();',
                  'if (a) {', '    g();', '    h();', '}', 'return;')
    after = body('int a = x;', '\nfirst(a);',
                 '\nif (a) {', '    b();', '}', 'else {', '    c();', '    d();', '}',
                 '\n// about e', 'e();', 'a = f();',
                 'if (a) {', '    g();', '    h();', '}', '\nreturn;')
    after = after.replace('    \n', '\n    ')
    check('space', house.space_text('x.h', before), after)
    check('space again', house.space_text('x.h', after), after)
    short = body('int a;', 'for (;;) {', '    a();', '    break;', '}')
    check('space around a block', house.space_text('x.h', short),
          short.replace('a;\n', 'a;\n\n', 1))
    switch = body('switch (x) {', 'case 1:', '    if (a) {', '        b();', '    }',
                  '    break;', '}')
    check('no space in a switch', house.space_text('x.h', switch), switch)


def test_split():
    check('split', house.split_text('x.h', body('a = 1, b = f(c, d); // why', 'e();')),
          body('a = 1;', 'b = f(c, d); // why', 'e();'))
    check('split adds braces',
          house.split_text('x.h', body('if (a) b(), c(); // why', 'else d();')),
          body('if (a) {', '    b();', '    c(); // why', '}', 'else d();'))
    same = body('int a, b;', 'for (a = 0, b = 1; a < b; a++, b--) f(a, b);', 'return a, b;')
    check('split leaves declarations and for', house.split_text('x.h', same), same)


def test_rename():
    text = '// idist__old and count.\n' + body('int count = x->count;', 'puts("idist__old");',
                                               'idist__old(count);')
    source = house.Source('idist_core.h', text)
    whole = house.region(source, None)
    check('rename', house.rename_text(source, {'idist__old': 'idist__new'}, whole)[0],
          text.replace('idist__old', 'idist__new').replace('"idist__new"', '"idist__old"'))
    inside = house.region(source, 'idist__a_f')
    check('rename in a function', house.rename_text(source, {'count': 'n'}, inside),
          (text.replace('int count', 'int n').replace('(count)', '(n)'), 2))
    with tempfile.TemporaryDirectory() as folder:
        header, table = folder + '/idist_core.h', folder + '/table'
        house.write(header, text)
        for name, words, good in (('taken', 'idist__old puts', False),
                                  ('twice', 'idist__old a\nputs a', False),
                                  ('exchanged', 'idist__old puts\nputs idist__old', True)):
            house.write(table, words + '\n')
            args = type('Args', (), dict(table=table, files=[header], where=None, strings=False,
                                         words=False))
            out, sys.stdout = sys.stdout, open(os.devnull, 'w')
            refused = refuses(lambda: house.command_rename(args))
            sys.stdout.close()
            sys.stdout = out
            check('rename, %s' % name, refused, not good)


for test in (test_reader, test_graph, test_rules, test_launchers, test_system, test_locale,
             test_space, test_split, test_rename):
    test()
print('1..%d' % n_run)
sys.exit(n_failed > 0)
