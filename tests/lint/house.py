#!/usr/bin/env python3
"""house.py - what the house rules say about the headers, and the mechanical steps towards them.

    house.py map [HEADERS]                    lines, functions and white space per file and section
    house.py uses [--write] [HEADERS]         the "uses" lines of the banners against the call graph
    house.py circles [HEADERS]                circles among sections, and uses of what stands below
    house.py check [--only RULE,..] [HEADERS] the rules; exits with 1 when one is broken
    house.py rename TABLE [--in WHERE] [--strings] [--words] FILES
    house.py space FILES                      blank lines between the steps of a function
    house.py split FILES                      a = 1, b = 2; becomes two statements

Without HEADERS: idist*.h two directories above this file. The headers are read as text: a tokenizer
and a parser of statements that know as much C as the headers use. What is found by name is found in
all branches of #if.

Rules of check:
    prefix      idist__SECTION_verb: a private function bears the name of the section it lives in
    uses        a uses line that is not what the call graph says
    banner      a section banner that is malformed
    floors      a call or use of a section further down the file, or on a higher floor
    decl        no blank line after the declarations that open a function
    columns     a line over 100 columns
    length      a function over 60 lines
    nesting     more than 4 levels of if, for, while, do and switch
    branches    more than 25 of if, for, while, case, &&, || and ?: in a function
    blank       less than 8 % blank lines in the functions of a header that have 8 lines or more
    statements  several statements on one line: a; b; or a, b; (not case X: a; break;)
    chain       if ((s = f()) != IDIST_OK) return s;
    comment     a comment that names an identifier of idist which does not exist
    launchers   the lists of launchers in idist.h are not those of the table in idist_launch.h
    system      an include, a name or a path of the operating system outside idist_os.h
    locale      a number with a fraction, printed or read with the locale's decimal point
    parse       a function that this script does not understand

rename reads lines "old new" and replaces whole identifiers in code and in comments. It refuses when
a new name is taken, or when two old names would become one. In comments, and in strings with
--strings, a name without underscore is taken for a word and stays, unless --words. --in limits it
to a file, to a section ([core:store] or core:store) or to a function, where members (a.x, a->x)
keep their names.
"""
import argparse
import bisect
import glob
import os
import re
import sys

# Files from the lowest floor to the highest. A section uses sections above it in its own file, and
# files that stand before its own in this list. Sections of the public API are open to everybody.
FLOORS = ['idist_begin.h', 'idist_end.h', 'idist_os.h', 'idist_base.h', 'idist_net.h',
          'idist_store.h', 'idist_launch.h', 'idist_core.h', 'idist_calls.h', 'idist.h',
          'idist_spawn.h',
          'idist_shm.h', 'idist_msg.h', 'idist_share.h', 'idist_algo.h', 'idist_connect.h',
          'idist_engine.h', 'idist_join.h', 'idist_ring.h',
          'idist_mpi.h', 'idist_gpu.h', 'idist_ipc.h', 'idist_nccl.h', 'idist_trace.h',
          'idist_train.h']

# Beginnings of private functions that a section may have besides its own name: tag -> words.
EXTRA_PREFIXES = {
}

# The same for all sections of a file.
FILE_PREFIXES = {
    'idist_shm.h': ['ring'], 'idist_msg.h': ['ring'], 'idist_share.h': ['ring'],
    'idist_algo.h': ['ring'], 'idist_connect.h': ['ring'], 'idist_engine.h': ['ring'],
    'idist_join.h': ['ring'],
    'idist_mpi.h': ['mpi'], 'idist_gpu.h': ['gpu'], 'idist_ipc.h': ['ipc', 'gpu'],
    'idist_nccl.h': ['nccl', 'gpu'],
    'idist_trace.h': ['trace'],
}

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))

MAX_COLUMNS = 100
MAX_LENGTH = 60
MAX_NESTING = 4
MAX_BRANCHES = 25
MIN_BLANK = 8.0     # per cent, in functions of at least
BLANK_LINES = 8     # lines, blank ones included
DECL_LINES = 6      # a function of so many lines, without blank ones, spaces its declarations off
RETURN_LINES = 8    # and one before its last return
BLOCK_LINES = 3     # a block of so many lines stands between blank lines

# The one header that may know the operating system, and what the others may still include: the C
# standard library, and by header what is no part of a system.
SYSTEM_FILE = 'idist_os.h'
C_HEADERS = set('''assert ctype errno float inttypes limits locale math stdarg stdatomic stdbool
    stddef stdint stdio stdlib string'''.split())
OTHER_HEADERS = {
    'idist_begin.h': ['exception', 'cxxabi.h'], # of C++: IDIST__CATCH
    'idist_base.h': ['cpuid.h'],                # of the compiler: what the processor can do
    'idist_mpi.h': ['mpi.h', 'mpi-ext.h'],      # of MPI
    'idist_nccl.h': ['cuda_runtime_api.h'],     # of CUDA
}

# Functions of the system, where they are called: transport->read is none.
CANCELLATION_POINTS = set("""accept accept4 clock_nanosleep close closedir connect dlopen epoll_wait
    fcntl fdatasync fdopendir fopen fprintf fsync ftruncate getaddrinfo getifaddrs glob localtime_r
    lockf msync nanosleep open openat poll posix_fallocate ppoll pread pthread_cond_timedwait
    pthread_cond_wait pthread_join pwrite read readdir readv recv recvfrom recvmsg select send
    sendmsg sendto system usleep waitid waitpid write writev""".split())
SYSTEM_CALLS = set('''abort accept accept4 access alarm bind chdir chmod clock clock_gettime close
    closedir connect creat ctime daemon dirfd dlclose dlerror dlopen dlsym dup dup2 dup3 eventfd
    execl execle execlp execv execve execvp fchmod fcntl fdatasync fdopen fdopendir fileno flock
    fork freeaddrinfo fstat fstatat fsync ftruncate futex getaddrinfo getcwd getegid getenv geteuid
    getgid gethostbyname gethostname getifaddrs getline getnameinfo getpagesize getpeername getpgid
    getpid getppid getpwuid getrandom getrlimit getrusage getsockname getsockopt gettid gettimeofday
    getuid glob globfree gmtime htonl htons if_nametoindex inet_ntop inet_pton ioctl isatty kill
    kqueue kevent link listen localtime localtime_r lseek lstat madvise memalign memfd_create mkdir
    mkdtemp mkstemp mlock mmap mprotect mremap msync munmap nanosleep ntohl ntohs open openat
    opendir pipe pipe2 poll posix_fallocate posix_memalign ppoll prctl pread preadv process_vm_readv
    pselect putenv pwrite pwritev raise read readdir readlink readv realpath recv recvfrom recvmsg
    rename renameat rmdir sched_getaffinity sched_setaffinity sched_yield select sem_open sem_post
    sem_wait send sendfile sendmsg sendto setenv setpgid setrlimit setsid setsockopt shm_open
    shm_unlink shutdown sigaction sigaddset sigemptyset sigfillset signal sleep socket socketpair
    stat strsignal symlink sysconf syscall system time truncate umask uname unlink unlinkat unsetenv
    usleep vfork wait wait4 waitid waitpid write writev _exit'''.split())
SYSTEM_STRUCTS = set('''addrinfo cmsghdr dirent epoll_event flock ifaddrs in6_addr in_addr iovec
    ip_mreq itimerspec kevent linger msghdr passwd pollfd rlimit rusage sigaction sockaddr
    sockaddr_in sockaddr_in6 sockaddr_storage sockaddr_un stat sysinfo timespec timeval tm ucred
    utsname winsize'''.split())
# Other names, wherever they stand.
SYSTEM_NAMES = re.compile(r'''
    pthread_\w+ | PTHREAD_\w+ | sem_t | sched_param | cpu_set_t
  | (pid|uid|gid|mode|off|ssize|nfds|socklen|clockid|dev|ino|sigset|sa_family|in_addr|time|glob)_t
  | epoll_\w+ | timerfd_\w+ | inotify_\w+ | posix_spawn\w* | environ | DIR
  | iov_(base|len) | revents | tv_(sec|usec|nsec) | sun_path | s[sa]_family | st_(ino|dev|size|mode)
  | POLL(IN|OUT|ERR|HUP|NVAL|PRI|RDHUP) | SIG[A-Z]{2,6}[0-9]? | SIG_(DFL|IGN|ERR|SETMASK) | EDQUOT
  | (AF|PF|SOCK|SOL|SO|SHUT|MSG|IPPROTO|TCP|INADDR|AI|EFD|FD|RLIMIT|RTLD|SYS|LOCK|PR|PROT|MAP|MADV
      |CLOCK|TIMER|FUTEX|SEEK|STDIN|STDOUT|STDERR|_SC)_[A-Z0-9_]+
  | O_(RDONLY|WRONLY|RDWR|[A-Z]+) | F_[A-Z_]+ | S_I[A-Z]+ | AT_[A-Z_]+
  | __(linux|unix|APPLE|FreeBSD|NetBSD|OpenBSD|ANDROID|MINGW32|MINGW64|CYGWIN|GLIBC)(__)?
  | _WIN(32|64)
  | HANDLE | DWORD | SOCKET | WSA[A-Z]\w+ | GetCurrentProcessId | VirtualAlloc
  | CreateProcess[AW]? | CreateThread | CreateFileMapping[AW]? | CloseHandle
''', re.X)
# What depends on the decimal point of the program's locale, outside the section that sees to it.
LOCALE_CALLS = set('atof strtod strtof strtold'.split())
LOCALE_FORMAT = re.compile(r'%(?:%|[-+#0-9.*]*[lL]?[aefgAEFG])')
LOCALE_SECTION = 'base:number'

SYSTEM_PATH = re.compile(r'"/(proc|dev|sys|run|tmp|etc)/')

RULES = ['prefix', 'uses', 'banner', 'floors', 'decl', 'columns', 'length', 'nesting', 'branches',
         'blank', 'statements', 'chain', 'comment', 'launchers', 'system', 'cancel', 'locale',
         'parse']

DASHES = '//' + '-' * 78
TAG = re.compile(r'// \[([a-z_]+):([a-z0-9_]+)\](.*)')

TYPE_WORDS = set('''auto bool char const double enum extern float int long register short signed
    static struct typedef union unsigned void volatile'''.split())
ATTRIBUTES = {'__attribute__', 'IDIST__UNUSED', 'IDIST__TLS'}
CONTROL = {'if', 'for', 'while', 'do', 'switch', 'else'}


class Refused(Exception):
    """A step that was not done, with the reason."""


# ---- tokens ----

INSIDE = r'''
  (?P<space>[ \t\r\n\f\\]+)
| (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
| (?P<string>"(?:[^"\\\n]|\\.)*")
| (?P<char>'(?:[^'\\\n]|\\.)*')
| (?P<name>[A-Za-z_]\w*)
| (?P<number>\.?[0-9](?:[eEpP][+-]|[\w.])*)
'''
PUNCT = r'''
| (?P<punct><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|::|.)
'''
TOKEN = re.compile(INSIDE + r'| (?P<pp>\#(?:\\\n|[^\n])*)' + PUNCT, re.X | re.S)
PP_TOKEN = re.compile(INSIDE + PUNCT, re.X | re.S)


def lex(text, regex=TOKEN):
    """Tokens (kind, text, position): code, in which a directive is one token; and comments."""
    code, comments = [], []
    for match in regex.finditer(text):
        kind = match.lastgroup
        if kind == 'space':
            continue
        token = (kind, match.group(), match.start())
        if kind == 'comment':
            comments.append(token)
        else:
            code.append(token)
            if kind == 'pp' and '/' in token[1]:
                comments += [(k, t, at + token[2]) for k, t, at in lex_directive(token)[1]]
    return code, comments


def lex_directive(token):
    """The tokens of a directive, with positions from its '#' on."""
    return lex(token[1], PP_TOKEN)


def spelling(text):
    """What must not change when only white space does. A directive is spelled by its own tokens."""
    code, comments = lex(text)
    tokens = []
    for kind, word, _ in code:
        tokens += [t for _, t, _ in lex(word, PP_TOKEN)[0]] if kind == 'pp' else [word]
    return tokens, [re.sub(r'\s+', ' ', t) for _, t, _ in comments]


# ---- statements ----

class Statement:
    """first and last are indices of tokens; children are the statements of a block, else bodies."""

    def __init__(self, kind, first):
        self.kind, self.first, self.last, self.children = kind, first, first, []
        self.head = None    # of if, for, while, switch: indices of its parentheses

    def walk(self, parent=None):
        yield self, parent
        for child in self.children:
            yield from child.walk(self)


class Misread(Exception):
    pass


def closing(code, i):
    """The index of what closes the bracket at i."""
    depth = 0
    for k in range(i, len(code)):
        word = code[k][1]
        if code[k][0] == 'punct':
            if word in '([{':
                depth += 1
            elif word in ')]}':
                depth -= 1
                if depth == 0:
                    return k
    raise Misread('a bracket is not closed')


def is_macro(word):
    return len(word) > 2 and word.isupper()


class Parser:
    def __init__(self, source):
        self.source, self.code = source, source.code

    def word(self, i):
        return self.code[i][1]

    def block(self, i):
        s = Statement('block', i)
        i += 1
        while self.word(i) != '}':
            child = self.statement(i)
            s.children.append(child)
            i = child.last + 1
        s.last = i
        return s

    def body(self, s, i):
        s.children.append(self.statement(i))
        s.last = s.children[-1].last

    def statement(self, i):
        kind, word = self.code[i][0], self.word(i)
        if word == '{':
            return self.block(i)
        if kind == 'pp':
            return Statement('pp', i)
        s = Statement(word if kind == 'name' else 'expr', i)
        if word in ('if', 'for', 'while', 'switch'):
            s.head = (i + 1, closing(self.code, i + 1))
            self.body(s, s.head[1] + 1)
            if word == 'if' and self.word(s.last + 1) == 'else':
                self.body(s, s.last + 2)
        elif word == 'else':  # its if is in another branch of #if
            self.body(s, i + 1)
        elif word == 'do':
            self.body(s, i + 1)
            s.head = (s.last + 2, closing(self.code, s.last + 2))
            s.last = s.head[1] + 1
        elif word in ('case', 'default'):
            while self.word(s.last) != ':':
                s.last += 1
        elif kind == 'name' and self.word(i + 1) == ':':
            s.kind, s.last = 'label', i + 1
        elif word in ('return', 'goto', 'break', 'continue'):
            s.last = self.semicolon(i)
        elif self.is_bare_macro(i):
            s.kind, s.last = 'macro', closing(self.code, i + 1)
        elif word == '}':
            raise Misread('a statement ends early')
        else:
            s.kind, s.last = 'decl' if self.is_declaration(i) else 'expr', self.semicolon(i)
        return s

    def semicolon(self, i):
        while self.word(i) != ';':
            if self.word(i) in ('(', '[', '{') and self.code[i][0] == 'punct':
                i = closing(self.code, i)
            elif self.word(i) == '}':
                raise Misread('a statement without semicolon')
            i += 1
        return i

    def is_bare_macro(self, i):
        """IDIST__CO_BEGIN(o) on a line of its own, without semicolon."""
        if not is_macro(self.word(i)) or self.word(i + 1) != '(':
            return False
        after = self.code[closing(self.code, i + 1) + 1]
        end = self.code[closing(self.code, i + 1)]
        if after[1] == ';' or (after[0] == 'punct' and after[1] not in '{}*('):
            return False
        return self.source.line(after[2]) > self.source.line(end[2])

    def is_declaration(self, i):
        word = self.word(i)
        if self.code[i][0] != 'name':
            return False
        if word in TYPE_WORDS:
            return True
        if self.code[i + 1][0] == 'name' and word not in ('sizeof', 'else'):
            return True
        if self.word(i + 1) == '(' and self.word(i + 2) == '*' and self.code[i + 3][0] == 'name':
            return self.word(i + 4) == ')' and self.word(i + 5) == '('
        k = i + 1
        while self.word(k) in ('*', 'const'):
            k += 1
        return k > i + 1 and self.code[k][0] == 'name'


# ---- files, sections, items ----

class Section:
    def __init__(self, source, tag, line):
        self.source, self.tag, self.line = source, tag, line
        self.head, self.name = tag.split(':') if tag else ('', '')
        self.is_open = not tag or 'api' in (self.head, self.name) or self.head.endswith('_api')
        self.end = 0        # the line behind it
        self.uses_lines = []
        self.functions = []
        self.order = ()

    def __repr__(self):
        return self.tag or self.source.name


class Item:
    """Something at file scope: the tokens first..last, the section, the names that it declares."""

    def __init__(self, kind, name, first, last, body=None):
        self.kind, self.name, self.first, self.last, self.body = kind, name, first, last, body
        self.section = None
        self.tree = None    # of a function: the block of its body
        self.names = []     # (name, kind): function proto type forward constant variable macro


class Source:
    def __init__(self, path, text=None):
        if text is None:
            with open(path, encoding='utf-8') as f:
                text = f.read()
        self.path, self.name, self.text = path, os.path.basename(path), text
        self.lines = text.split('\n')
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.code, self.comments = lex(text)
        self.sections = self.find_sections()
        self.items = self.find_items()
        self.misread = []
        self.functions = [item for item in self.items if item.kind == 'function']
        for item in self.functions:
            try:
                item.tree = Parser(self).block(item.body)
            except (Misread, IndexError) as e:
                self.misread.append((item, str(e)))

    def line(self, position):
        """The number of the line, from 1."""
        return bisect.bisect_right(self.starts, position)

    def first_line(self, x):
        return self.line(self.code[x.first][2])

    def last_line(self, x):
        kind, word, at = self.code[x.last]
        return self.line(at + len(word) - 1)

    def body_lines(self, item):
        """The lines between the braces of a function."""
        return self.lines[self.line(self.code[item.body][2]):self.last_line(item) - 1]

    def find_sections(self):
        """What stands before all banners, and around the parts of a header, has no tag."""
        sections = [Section(self, '', 1)]
        for i, line in enumerate(self.lines):
            match = TAG.match(line)
            if match and i and self.lines[i - 1].startswith('//--------'):
                sections[-1].end = i
                sections.append(Section(self, '%s:%s' % match.group(1, 2), i + 1))
                k = i + 1
                while self.lines[k].split(' ')[:2] == ['//', 'uses']:
                    sections[-1].uses_lines.append(k + 1)
                    k += 1
            elif line.startswith('#if defined(IDIST_IMPLEMENTATION)'):
                sections[-1].end = i + 1
                sections.append(Section(self, '', i + 1))
        sections[-1].end = len(self.lines) + 1
        return sections

    def section_at(self, line):
        return self.sections[bisect.bisect_right([s.line for s in self.sections], line) - 1]

    # What stands at file scope.

    def find_items(self):
        items, i = [], 0
        while i < len(self.code):
            item = self.item_at(i)
            i = item.last + 1
            item.section = self.section_at(self.first_line(item))
            self.name_item(item)
            items.append(item)
            if item.kind == 'function':
                item.section.functions.append(item)
        return items

    def item_at(self, i):
        code = self.code
        if code[i][0] == 'pp':
            return Item('pp', self.defined_by(code[i]), i, i)
        if code[i][1] == 'extern' and code[i + 1][0] == 'string' and code[i + 2][1] == '{':
            return Item('extern', None, i, i + 2)
        if code[i][1] in ('}', ';'):
            return Item('end', None, i, i)
        if is_macro(code[i][1]) and code[i + 1][1] == '(':
            end = closing(code, i + 1)
            if end + 1 == len(code) or self.line(code[end + 1][2]) > self.line(code[end][2]):
                return Item('macro', code[i][1], i, end)
        k, equals = i, False
        while code[k][1] != ';':
            word = code[k][1] if code[k][0] == 'punct' else ''
            equals = equals or word == '='
            if word == '{' and not equals and k > i and self.ends_a_signature(i, k):
                return Item('function', self.function_name(i, k), i, closing(code, k), k)
            if word in ('(', '[', '{'):
                k = closing(code, k)
            k += 1
            if k == len(code):
                raise Refused('%s:%d: not understood' % (self.name, self.line(code[i][2])))
        return Item('declaration', None, i, k)

    def ends_a_signature(self, i, k):
        return self.code[k - 1][1] == ')' and self.function_name(i, k) is not None

    def function_name(self, i, k):
        """The first name before an outermost parenthesis that is no attribute and no macro."""
        code, before = self.code, None
        while i < k:
            kind, word, _ = code[i]
            if word == '(' and kind == 'punct':
                if before and not is_macro(before) and before not in TYPE_WORDS | ATTRIBUTES:
                    return before if code[i + 1][1] != '*' else None
                i = closing(code, i)
            if word == '=' or word == '{':
                return None
            before = word if kind == 'name' else None
            i += 1
        return None

    @staticmethod
    def defined_by(token):
        match = re.match(r'#\s*define\s+(\w+)', token[1])
        return match.group(1) if match else None

    def name_item(self, item):
        code = self.code
        for k in range(item.first, item.last + 1):
            if code[k][0] == 'pp' and self.defined_by(code[k]):
                item.names.append((self.defined_by(code[k]), 'macro'))
        if item.kind == 'function':
            item.names.append((item.name, 'function'))
        if item.kind != 'declaration':
            return
        for k in range(item.first, item.last):
            if code[k][1] in ('struct', 'union', 'enum') and code[k + 1][0] == 'name':
                if code[k + 2][1] in ('{', ';', '*'):
                    kind = 'type' if code[k + 2][1] == '{' else 'forward'
                    item.names.append((code[k + 1][1], kind))
            if code[k][1] == 'enum':
                brace = k + 1 if code[k + 1][1] == '{' else k + 2
                if code[brace][1] == '{':
                    self.name_constants(item, brace)
        name = self.function_name(item.first, item.last)
        if code[item.first][1] == 'typedef':
            word = code[item.first + 1][1]
            opaque = word in ('struct', 'union') and code[item.first + 3][1] != '{'
            item.name = self.declarators(item)[-1]
            item.names.append((item.name, 'forward' if opaque else 'type'))
        elif name:
            item.kind, item.name = 'prototype', name
            item.names = [(name, 'proto')]
        else:
            variables = self.declarators(item)
            item.names += [(v, 'variable') for v in variables]
            item.name = (variables or [n for n, _ in item.names] or [None])[0]

    def name_constants(self, item, brace):
        for k in range(brace + 1, closing(self.code, brace)):
            if self.code[k][0] == 'name' and self.code[k - 1][1] in ('{', ','):
                item.names.append((self.code[k][1], 'constant'))

    def declarators(self, item):
        """The names that a typedef or a variable declares."""
        code, i, names, last = self.code, item.first, [], None
        while i <= item.last:
            kind, word, _ = code[i]
            if word == '(' and code[i + 1][1] == '*' and code[i + 2][0] == 'name':
                last = code[i + 2][1]
            if word in ('(', '[', '{') and kind == 'punct':
                i = closing(code, i)
            elif word in ('=', ',', ';'):
                names += [last] if last else []
                last = None
                while word == '=' or code[i][1] not in (',', ';'):
                    word = ''
                    i = closing(code, i) + 1 if code[i][1] in ('(', '[', '{') else i + 1
            elif kind == 'name' and word not in TYPE_WORDS and word not in ATTRIBUTES:
                last = word if code[i - 1][1] not in ('struct', 'union', 'enum') else None
            i += 1
        return names

    def names_used(self, item):
        """Names in an item, without members and without what it defines."""
        own = {name for name, _ in item.names}
        used, before = {}, ''
        for k in range(item.first, item.last + 1):
            kind, word, at = self.code[k]
            if kind == 'name':
                if before not in ('.', '->') and word not in own:
                    used.setdefault(word, at)
            elif kind == 'pp' and not word.startswith('#undef') and not word.startswith('#include'):
                for kind2, word2, at2 in lex_directive(self.code[k])[0]:
                    if kind2 == 'name' and word2 not in own:
                        used.setdefault(word2, at + at2)
            before = word
        return used


# ---- the graph of sections ----

class House:
    def __init__(self, sources):
        floor = {name: i for i, name in enumerate(FLOORS)}
        self.sources = sorted(sources, key=lambda s: (floor.get(s.name, len(FLOORS)), s.name))
        self.sections = []
        self.definitions = {}   # name -> [(section, kind, item)]
        for f, source in enumerate(self.sources):
            for i, section in enumerate(source.sections):
                section.order = (f, i)
                if section.tag:
                    self.sections.append(section)
            for item in source.items:
                for name, kind in item.names:
                    self.definitions.setdefault(name, []).append((item.section, kind, item))
        self.edges = {}         # (section, section) -> {(user, used): line of the use}
        for source in self.sources:
            for item in source.items:
                if item.kind != 'prototype' and item.section.tag:
                    self.add_edges(source, item)

    def add_edges(self, source, item):
        for name, at in source.names_used(item).items():
            if name not in self.definitions:
                continue
            target = self.owner(name, item.section)
            if target and target is not item.section and target.tag:
                pairs = self.edges.setdefault((item.section, target), {})
                pairs.setdefault((item.name or '-', name), source.line(at))

    def owner(self, name, user):
        """The section that a name belongs to, seen from another. A function belongs to who
        defines it. A type that is defined further down can only be opaque here, and
        belongs to who declared it."""
        found = self.definitions[name]
        real = [s for s, kind, _ in found if kind not in ('forward', 'proto')]
        if not real:
            return None
        above = [s for s in real if s.order <= user.order]
        if user in above:
            return user
        if above:
            return max(above, key=lambda s: s.order)
        forward = [s for s, kind, _ in found if kind == 'forward' and s.order <= user.order]
        if forward:
            return user if user in forward else max(forward, key=lambda s: s.order)
        return min(real, key=lambda s: s.order)

    def used_by(self, section):
        used = {b for (a, b) in self.edges if a is section and not b.is_open}
        return sorted(used, key=lambda s: s.order)

    def short_name(self, section, seen_from):
        """The name without the file's where it is the only one, or the file is the reader's."""
        same = [s for s in self.sections if s.name == section.name and not s.is_open]
        here = [s for s in same if s.source is seen_from.source]
        if section in here and len(here) == 1:
            return section.name
        return section.name if len(same) == 1 else section.tag

    def uses_text(self, section):
        """The lines "// uses a b c" of a section."""
        lines, line = [], '// uses'
        for name in [self.short_name(s, section) for s in self.used_by(section)] or ['-']:
            if len(line) + 1 + len(name) > 80:
                lines.append(line)
                line = '// uses'
            line += ' ' + name
        return lines + [line]

    def upward(self):
        """Edges to a section further down the file or on a higher floor."""
        return [(a, b) for a, b in self.edges
                if b.order > a.order and not a.is_open and not b.is_open]

    def forward_declarations(self):
        """Prototypes of private functions: (item, section of the definition, callers before it)."""
        for source in self.sources:
            for item in source.items:
                if item.kind != 'prototype' or not item.name.startswith('idist__'):
                    continue
                found = [x for x in self.definitions[item.name] if x[1] == 'function']
                if found:
                    limit = (found[0][0].order, found[0][2].first)
                    before = [(s, f) for s in self.sources for f in s.functions
                              if (f.section.order, f.first) < limit]
                    callers = [f.name for s, f in before if item.name in s.names_used(f)]
                    yield item, found[0][0], callers

    def circles(self):
        """Strongly connected components of more than one section (Tarjan)."""
        follow = {s: [] for s in self.sections}
        for a, b in self.edges:
            if not a.is_open and not b.is_open:
                follow[a].append(b)
        index, low, stack, found = {}, {}, [], []

        def visit(s):
            index[s] = low[s] = len(index)
            stack.append(s)
            for t in follow[s]:
                if t not in index:
                    visit(t)
                    low[s] = min(low[s], low[t])
                elif t in stack:
                    low[s] = min(low[s], index[t])
            if low[s] == index[s]:
                at = stack.index(s)
                component = stack[at:]
                del stack[at:]
                if len(component) > 1:
                    found.append(sorted(component, key=lambda x: x.order))

        for s in self.sections:
            if s not in index:
                visit(s)
        return found


# ---- commands that report ----

def blank_share(source, functions):
    lines = blank = 0
    for item in functions:
        body = source.body_lines(item)
        if len(body) >= BLANK_LINES:
            lines += len(body)
            blank += sum(not line.strip() for line in body)
    return lines, 100.0 * blank / lines if lines else 0.0


def command_map(house, _args):
    def row(name, nlines, source, functions):
        longest = max(functions, key=lambda f: len(source.body_lines(f)), default=None)
        share = blank_share(source, functions)
        print('%-20s %6d lines %4d functions  blank %4.1f %%%s' %
              (name, nlines, len(functions), share[1],
               '  longest %3d %s' % (len(source.body_lines(longest)), longest.name)
               if longest else ''))

    for source in house.sources:
        row(source.name, len(source.lines) - 1, source, source.functions)
        for section in source.sections:
            if section.tag:
                row('  ' + section.tag, section.end - section.line, source, section.functions)
    return 0


def false_uses(house):
    """Sections whose uses lines are not true: (section, the lines, what they should be)."""
    for section in house.sections:
        now = [section.source.lines[n - 1] for n in section.uses_lines]
        want = house.uses_text(section)
        if now != want and not section.is_open:
            yield section, now, want


def command_uses(house, args):
    wrong = list(false_uses(house))
    if not args.write:
        for section, now, want in wrong:
            text = ' '.join(want)[3:]
            print('%s:%d: [%s] %s' % (section.source.name, section.line, section.tag, text))
            print('    instead of: %s' % (' '.join(now)[3:] or 'nothing'))
        return bool(wrong)
    for section, now, want in reversed(wrong):
        section.source.lines[section.line:section.line + len(now)] = want
    for source in {section.source for section, _, _ in wrong}:
        write(source.path, '\n'.join(source.lines))
    print('%d uses lines written' % len(wrong))
    return 0


def print_pairs(pairs):
    """Caller -> callees, wrapped."""
    users = {}
    for user, used in sorted(pairs):
        users.setdefault(user, []).append(used)
    line = '     '
    for user, used in users.items():
        text = ' %s -> %s;' % (user, ', '.join(used))
        if len(line) + len(text) > 140 and line.strip():
            print(line)
            line = '     '
        line += text
    print(line.rstrip(';'))


def command_circles(house, _args):
    circles = house.circles()
    for circle in circles:
        print('circle of %d: %s' % (len(circle), ' '.join(map(str, circle))))
    up = sorted(house.upward(), key=lambda e: (e[0].order, e[1].order))
    for a, b in up:
        print('up: [%s] -> [%s]' % (a, b))
        print_pairs(house.edges[a, b])
    for item, home, callers in house.forward_declarations():
        print('prototype: %s in [%s], defined in [%s], called before that by %s' %
              (item.name, item.section, home, ', '.join(callers) or 'nobody'))
    print('%d circles, %d edges upward with %d uses' %
          (len(circles), len(up), sum(len(house.edges[e]) for e in up)))
    return bool(circles or up)


# ---- rules ----

def rule_prefix(house, known):
    for section in house.sections:
        words = [section.name, '%s_%s' % (section.head, section.name)]
        words += EXTRA_PREFIXES.get(section.tag, []) + FILE_PREFIXES.get(section.source.name, [])
        words = tuple(w + '_' for w in words)
        for item in section.functions:
            verb = item.name[len('idist__'):] + '_'
            if item.name.startswith('idist__') and not verb.startswith(words):
                line = section.source.first_line(item)
                yield section.source, line, '[%s] has %s' % (section, item.name)


def rule_uses(house, known):
    for section, now, want in false_uses(house):
        yield section.source, section.line, '[%s] %s' % (section, ' '.join(want)[3:])


def rule_banner(house, known):
    tags = {}
    for source in house.sources:
        stem = source.name[len('idist_'):-2]
        heads = {stem, stem + '_api'} if stem else {'api', 'impl'}
        for i, line in enumerate(source.lines):
            if re.match(r'//---', line) and line != DASHES:
                yield source, i + 1, 'a banner has lines of %d columns' % len(DASHES)
            match = TAG.match(line)
            after = source.lines[i + 1] if match else ''
            if match and after.startswith(('// uses ', '//---')) and source.lines[i - 1] != DASHES:
                yield source, i + 1, 'no line of dashes above [%s:%s]' % match.group(1, 2)
        for section in source.sections:
            if not section.tag:
                continue
            text = TAG.match(source.lines[section.line - 1]).group(3)
            if not re.match(r'  \S', text):
                yield source, section.line, 'behind [%s]: two blanks and what it is' % section
            if section.head not in heads:
                yield source, section.line, '[%s] is not named after its file' % section
            if section.tag in tags:
                yield source, section.line, '[%s] is in %s as well' % (section, tags[section.tag])
            tags[section.tag] = source.name
            if not section.is_open and not section.uses_lines:
                yield source, section.line, '[%s] has no uses line' % section
            k = section.line
            while source.lines[k].startswith('//') and source.lines[k] != DASHES:
                k += 1
            if source.lines[k] != DASHES:
                yield source, section.line, 'the banner of [%s] is not closed' % section


def rule_floors(house, known):
    for a, b in house.upward():
        for (user, used), line in sorted(house.edges[a, b].items()):
            yield a.source, line, '%s of [%s] uses %s of [%s]' % (user, a, used, b)
    for item, home, _ in house.forward_declarations():
        if item.section is home:
            line = home.source.first_line(item)
            yield home.source, line, 'a prototype of %s, defined in [%s]' % (item.name, home)


def rule_decl(house, known):
    for source in house.sources:
        for item in source.functions:
            if item.tree and after_declarations(source, item) and \
                    not has_blank(source, *after_declarations(source, item)):
                line = source.first_line(after_declarations(source, item)[1])
                yield source, line, 'no blank line after the declarations of %s' % item.name


def rule_columns(house, known):
    for source in house.sources:
        for i, line in enumerate(source.lines):
            if len(line) > MAX_COLUMNS:
                yield source, i + 1, '%d columns' % len(line)


def rule_length(house, known):
    for source in house.sources:
        for item in source.functions:
            n = len(source.body_lines(item))
            if n > MAX_LENGTH:
                yield source, source.first_line(item), '%s has %d lines' % (item.name, n)


def nesting(s, depth=0):
    """The deepest level of control inside a statement; else if is on the level of its if."""
    deeper = depth + (s.kind in CONTROL)
    most = deeper
    for i, child in enumerate(s.children):
        is_else_if = s.kind == 'if' and i == 1 and child.kind == 'if'
        most = max(most, nesting(child, depth if is_else_if else deeper))
    return most


def rule_nesting(house, known):
    for source in house.sources:
        for item in source.functions:
            n = nesting(item.tree) if item.tree else 0
            if n > MAX_NESTING:
                yield source, source.first_line(item), '%s has %d levels' % (item.name, n)


def rule_branches(house, known):
    words = {'if', 'for', 'while', 'case', '&&', '||', '?'}
    for source in house.sources:
        for item in source.functions:
            n = sum(word in words for _, word, _ in source.code[item.body:item.last])
            if n > MAX_BRANCHES:
                yield source, source.first_line(item), '%s has %d branches' % (item.name, n)


def rule_blank(house, known):
    for source in house.sources:
        lines, share = blank_share(source, source.functions)
        if lines and share < MIN_BLANK:
            yield source, 1, '%.1f %% of the lines of its functions are blank' % share


def rule_statements(house, known):
    for source in house.sources:
        for item in source.functions:
            for s, _ in item.tree.walk() if item.tree else ():
                if commas(source, s):
                    yield source, source.first_line(s), 'statements joined by commas'
                labels = ('case', 'default', 'label')
                for before, a, b in zip([None] + s.children, s.children, s.children[1:]):
                    if s.kind != 'block' or a.kind in labels:
                        continue
                    if source.last_line(a) != source.first_line(b):
                        continue
                    if not (before and before.kind in labels and b.kind in ('break', 'return')):
                        yield source, source.first_line(b), 'two statements on one line'


def rule_chain(house, known):
    for source in house.sources:
        for item in source.functions:
            for s, _ in item.tree.walk() if item.tree else ():
                if s.kind == 'if':
                    words = [t[1] for t in source.code[s.head[0]:s.head[1]]]
                    if '=' in words and 'IDIST_OK' in words:
                        yield source, source.first_line(s), 'a status assigned inside if'


def rule_comment(house, known):
    for source in house.sources:
        for _, text, at in source.comments:
            for match in re.finditer(r'(?<![\w/.-])_?(?:idist|IDIST)_\w*', text):
                name, rest = match.group(), text[match.end():match.end() + 2]
                if name in known.names or known.makes(name) or re.match(r'\.[ch]', rest):
                    continue
                if (rest[:1] in ('*', '<') or name.endswith('_')) and known.begins(name):
                    continue
                yield source, source.line(at + match.start()), 'no such thing as %s' % name


def table_of_launchers(source):
    """Names in order, none first, and (rank, size) variables of the rows of idist__launchers."""
    table = source.text.split('idist__launchers[] = {', 1)[1].split('};', 1)[0]
    rows = re.findall(r'\{(IDIST__LAUNCHER_\w+),\s*(?:NULL|"(\w+)"),\s*"(\w+)",\s*"(\w+)"', table)
    names = ['none']
    for kind, name, _, _ in rows:
        if name and name not in names:
            names += [name] + (['torchrun'] if kind == 'IDIST__LAUNCHER_ENV' else [])
    return names, [(rank, size) for _, _, rank, size in rows]


def documented_launchers(source):
    """The same two, as idist.h has them, and the lines where they stand."""
    chosen = re.search(r'IDIST_LAUNCHER selects one: ([^.]*)\.', source.text)
    first = re.search(r'Rank and size come from the first of these that is set:\n', source.text)
    names = re.split(r',\s*', chosen.group(1))
    pairs = []
    for line in source.text[first.end():].split('\n'):
        words = re.match(r'        ([A-Z]\w+)(?:, (\w+))?(?:  |$)', line)
        if words:
            rank, size = words.group(1), words.group(2) or words.group(1)
            pairs.append((rank, rank[:-5] + size if size[0] == '_' else size))
        if 'none of them' in line:
            break
    return names, pairs, source.line(chosen.start()), source.line(first.start())


def rule_launchers(house, known):
    sources = {source.name: source for source in house.sources}
    if not {'idist.h', 'idist_launch.h'} <= set(sources):
        return
    api = sources['idist.h']
    names, pairs = table_of_launchers(sources['idist_launch.h'])
    doc_names, doc_pairs, names_line, pairs_line = documented_launchers(api)
    if doc_names != names:
        yield api, names_line, 'IDIST_LAUNCHER: the table has ' + ', '.join(names)
    if doc_pairs != pairs:
        yield api, pairs_line, 'the table has ' + '; '.join(', '.join(p) for p in pairs)


def all_tokens(source):
    """The tokens of the code, those of directives in place of the directives."""
    for kind, word, at in source.code:
        if kind == 'pp':
            yield from ((k, w, at + a) for k, w, a in lex_directive((kind, word, at))[0])
        else:
            yield kind, word, at


def system_uses(source):
    """What a header knows of the operating system: (line, what)."""
    tokens = [('punct', '', 0)] + list(all_tokens(source)) + [('punct', '', 0)]
    for (_, before, _), (kind, word, at), (_, after, _) in zip(tokens, tokens[1:], tokens[2:]):
        line = source.line(at)
        if kind == 'string' and SYSTEM_PATH.match(word):
            yield line, word
        if kind != 'name':
            continue
        if SYSTEM_NAMES.fullmatch(word) or (before == 'struct' and word in SYSTEM_STRUCTS):
            yield line, word
        elif word in SYSTEM_CALLS and after == '(' and before not in ('.', '->', '*'):
            yield line, word + '()'
    for i, line in enumerate(source.lines):
        match = re.match(r'\s*#\s*include\s*<([^>]+)>', line)
        if match:
            name, allowed = match.group(1), OTHER_HEADERS.get(source.name, [])
            if name not in allowed and not (name.endswith('.h') and name[:-2] in C_HEADERS):
                yield i + 1, '<%s>' % name


def rule_system(house, known):
    for source in house.sources:
        if source.name == SYSTEM_FILE:
            continue
        for line, what in system_uses(source):
            yield source, line, '%s belongs in %s' % (what, SYSTEM_FILE)


def rule_cancel(house, known):
    """A cancellation point would let pthread_cancel end a thread that holds a lock."""
    for source in house.sources:
        if source.name != SYSTEM_FILE:
            continue
        depth, wrapped = 0, None  # the parentheses around a token; at IDIST__OS_CALL
        tokens = [('punct', '', 0)] + source.code + [('punct', '', 0)]
        for (_, before, _), (kind, word, at), (_, after, _) in zip(tokens, tokens[1:], tokens[2:]):
            if word == '(':
                depth += 1
                if before == 'IDIST__OS_CALL' and wrapped is None:
                    wrapped = depth
            elif word == ')':
                if depth == wrapped:
                    wrapped = None
                depth -= 1
            elif kind == 'name' and word in CANCELLATION_POINTS and after == '(' and \
                    before not in ('.', '->', '*') and wrapped is None:
                yield source, source.line(at), '%s() without IDIST__OS_CALL' % word


def rule_locale(house, known):
    for source in house.sources:
        for kind, word, at in all_tokens(source):
            line = source.line(at)
            if source.section_at(line).tag == LOCALE_SECTION:
                continue
            found = [word + '()'] if kind == 'name' and word in LOCALE_CALLS else []
            if kind == 'string':
                found = [f for f in LOCALE_FORMAT.findall(word) if f != '%%']
            for what in found:
                yield source, line, '%s depends on the locale; use [%s]' % (what, LOCALE_SECTION)


def rule_parse(house, known):
    for source in house.sources:
        for item, why in source.misread:
            yield source, source.first_line(item), '%s: %s' % (item.name, why)


class Known:
    """Every identifier of idist that stands somewhere outside the comments of the headers."""

    def __init__(self, house):
        self.names, self.words, self.pasted = set(), set(), set()
        for source in house.sources:
            for kind, word, _ in source.code:
                if kind == 'name':
                    self.words.add(word)
                elif kind in ('string', 'pp'):
                    self.words.update(re.findall(r'\w+', word))
                    self.pasted.update(re.findall(r'\b(_?idist\w*)##', word, re.I))
        paths = glob.glob(ROOT + '/tests/**', recursive=True)
        paths += glob.glob(ROOT + '/examples/**', recursive=True)
        for path in paths + [ROOT + '/Makefile']:
            self.names.add(os.path.splitext(os.path.basename(path))[0])
            if re.search(r'\.(c|h|cc|cpp|cu|sh|py)$|Makefile$', path) and 'house' not in path:
                with open(path, encoding='utf-8', errors='replace') as f:
                    self.names.update(re.findall(r'\b_?idist_\w+', f.read(), re.I))
        self.names |= self.words
        self.sorted = sorted(self.names)

    def makes(self, name):
        """IDIST_##name in an X-macro makes IDIST_ERR_SYSTEM out of ERR_SYSTEM."""
        return any(name.startswith(p) and name[len(p):] in self.words for p in self.pasted)

    def begins(self, name):
        i = bisect.bisect_left(self.sorted, name)
        return i < len(self.sorted) and self.sorted[i].startswith(name)


def command_check(house, args):
    only = args.only.split(',') if args.only else RULES
    for rule in only:
        if rule not in RULES:
            raise Refused('no rule %s; there are: %s' % (rule, ' '.join(RULES)))
    known = Known(house) if 'comment' in only else None
    count = 0
    for rule in only:
        for source, line, text in globals()['rule_' + rule](house, known):
            print('%s:%d: %s: %s' % (source.name, line, rule, text))
            count += 1
    return bool(count)


# ---- commands that write ----

def write(path, text):
    with open(path, 'w', encoding='utf-8') as f:
        f.write(text)


def has_blank(source, a, b):
    """Whether there is a blank line between two statements."""
    between = source.lines[source.last_line(a):source.first_line(b) - 1]
    return any(not line.strip() for line in between)


def solid(source, x):
    """Lines of a statement that are not blank."""
    lines = source.lines[source.first_line(x) - 1:source.last_line(x)]
    return sum(bool(line.strip()) for line in lines)


def after_declarations(source, item):
    """The last declaration at the start of a function of some size, and the statement behind it."""
    if sum(bool(line.strip()) for line in source.body_lines(item)) < DECL_LINES:
        return None
    children = item.tree.children
    for a, b in zip(children, children[1:]):
        if a.kind != 'decl':
            return None
        if b.kind != 'decl':
            return (a, b) if b.kind != 'pp' else None
    return None


def is_big(source, s):
    """A block of several lines, or a control statement that has one."""
    if s.kind not in CONTROL and s.kind != 'block':
        return False
    return solid(source, s) >= BLOCK_LINES and any(x.kind == 'block' for x, _ in s.walk())


def feeds(source, a, b):
    """Whether a is x = ...; and b asks for x: then they are one step."""
    code = source.code
    if a.kind != 'expr' or code[a.first + 1][1] != '=' or not b.head or b.kind in ('for', 'do'):
        return False
    return code[a.first][1] in [word for _, word, _ in code[b.head[0]:b.head[1]]]


def wants_blank(source, item, block, a, b):
    """Whether a blank line belongs between two statements that follow each other in a block."""
    labels = ('case', 'default')
    if source.last_line(a) == source.first_line(b) or 'pp' in (a.kind, b.kind):
        return False
    if a.kind in labels or a.kind == 'label' or b.kind in labels:
        return False
    if (a, b) == after_declarations(source, item):
        return True
    if (is_big(source, b) and not feeds(source, a, b)) or (is_big(source, a) and b.kind != 'break'):
        return True
    if block is item.tree and b is block.children[-1] and b.kind == 'return':
        return sum(bool(line.strip()) for line in source.body_lines(item)) >= RETURN_LINES
    return False


def space_text(path, text):
    source = Source(path, text)
    lines = source.lines
    insert = set()
    for item in source.functions:
        for block, _ in item.tree.walk() if item.tree else ():
            if block.kind != 'block':
                continue
            for a, b in zip(block.children, block.children[1:]):
                if wants_blank(source, item, block, a, b) and not has_blank(source, a, b):
                    insert.add(line_before(source, a, b))
    out = []
    for i, line in enumerate(lines):
        if i in insert:
            out.append('')
        out.append(line)
    new = '\n'.join(out)
    if spelling(new) != spelling(text):
        raise Refused('%s: space would change more than white space' % path)
    return new


def indent_of(line):
    return len(line) - len(line.lstrip())


def line_before(source, a, b):
    """The index of the first line of b, or of the comment above that belongs to it."""
    i = source.first_line(b) - 1
    while i > source.last_line(a) and indent_of(source.lines[i - 1]) == indent_of(source.lines[i]):
        i -= 1
    return i


def command_space(args):
    for path in args.files:
        with open(path, encoding='utf-8') as f:
            text = f.read()
        new = space_text(path, text)
        if new != text:
            write(path, new)
    return 0


def commas(source, s):
    """The commas that join expressions to a statement: indices of tokens."""
    found = []
    if s.kind != 'expr':
        return found
    k = s.first
    while k < s.last:
        kind, word, _ = source.code[k]
        if kind == 'punct' and word in '([{':
            k = closing(source.code, k)
        elif kind == 'punct' and word == ',':
            found.append(k)
        k += 1
    return found


def split_text(path, text):
    source = Source(path, text)
    edits = []      # (position, length, new text)
    expected = {}   # token -> its words afterwards
    for item in source.functions:
        for s, parent in item.tree.walk() if item.tree else ():
            joints = commas(source, s)
            if not joints:
                continue
            indent = ' ' * indent_of(source.lines[source.first_line(s) - 1])
            braces = parent.kind != 'block'
            inner = indent + '    ' if braces else indent
            for k in joints:
                edits.append((source.code[k][2], 1, ';\n' + inner))
                expected[k] = [';']
            if braces:
                edits.append((source.code[s.first][2], 0, '{\n' + inner))
                expected.setdefault(s.first, [source.code[s.first][1]]).insert(0, '{')
                end = source.starts[source.last_line(s)] - 1    # behind a comment that follows it
                rest = text[source.code[s.last][2] + 1:end]
                if not re.match(r'\s*//', rest):
                    end = source.code[s.last][2] + 1
                edits.append((end, 0, '\n' + indent + '}'))
                expected.setdefault(s.last, [';']).append('}')
    words = []
    for k, (_, word, _) in enumerate(source.code):
        words += expected.get(k, [word])
    new = text
    for at, length, put in sorted(edits, reverse=True):
        rest = new[at + length:]
        new = new[:at] + put + (rest.lstrip(' \n') if put.startswith((';', '{')) else rest)
    if [t for _, t, _ in lex(new)[0]] != words:
        raise Refused('%s: split would change more than commas' % path)
    return new


def command_split(args):
    for path in args.files:
        with open(path, encoding='utf-8') as f:
            text = f.read()
        new = split_text(path, text)
        if new != text:
            write(path, new)
    return 0


def read_table(path):
    table = {}
    with open(path, encoding='utf-8') as f:
        for n, line in enumerate(f, 1):
            words = line.split()
            if not words or words[0].startswith('#'):
                continue
            if len(words) != 2 or not all(re.fullmatch(r'[A-Za-z_]\w*', w) for w in words):
                raise Refused('%s:%d: not "old new"' % (path, n))
            if table.setdefault(words[0], words[1]) != words[1]:
                raise Refused('%s:%d: %s has two new names' % (path, n, words[0]))
    if len(set(table.values())) < len(table):
        twice = sorted({new for new in table.values() if list(table.values()).count(new) > 1})
        raise Refused('two old names for %s' % ' '.join(twice))
    return table


def region(source, where):
    """The part of a file that --in names, and whether it is a function: (start, end, bool)."""
    if where is None or where in (source.path, source.name):
        return 0, len(source.text), False
    for section in source.sections:
        if section.tag and section.tag == where.strip('[]'):
            end = min(section.end, len(source.lines))
            return source.starts[section.line - 1], source.starts[end - 1], False
    found = [f for f in source.functions if f.name == where]
    if found:
        # The comment above a function speaks of its parameters.
        first = source.first_line(found[0]) - 1
        while first and source.lines[first - 1].startswith('//'):
            first -= 1
        return source.starts[first], source.starts[source.last_line(found[-1])], True
    return None


def rename_text(source, table, part, strings=False, words=False):
    """The text with new names, and how many were replaced."""
    start, end, is_function = part
    edits = []

    def plain(text, at):
        for match in re.finditer(r'[A-Za-z_]\w*', text):
            if match.group() in table and (words or '_' in match.group()):
                edits.append((at + match.start(), match.group()))

    def token(kind, word, at, before):
        if kind == 'name' and word in table and not (is_function and before in ('.', '->')):
            edits.append((at, word))
        elif kind == 'string' and strings:
            plain(word, at)

    before = ''
    for kind, word, at in source.code:
        if kind == 'pp':
            inner = ''
            for kind2, word2, at2 in lex_directive((kind, word, at))[0]:
                token(kind2, word2, at + at2, inner)
                inner = word2
        else:
            token(kind, word, at, before)
        before = word
    for _, text, at in source.comments:
        plain(text, at)
    out, done, count = [], 0, 0
    for at, word in sorted(edits):
        if start <= at < end:
            out += [source.text[done:at], table[word]]
            done = at + len(word)
            count += 1
    return ''.join(out) + source.text[done:], count


def names_in(source, part):
    names = set()
    for kind, word, at in source.code:
        if part[0] <= at < part[1]:
            if kind == 'name':
                names.add(word)
            elif kind == 'pp':
                names.update(w for k, w, _ in lex_directive((kind, word, at))[0] if k == 'name')
    return names


def command_rename(args):
    table = read_table(args.table)
    sources = [Source(path) for path in args.files]
    parts = [(s, region(s, args.where)) for s in sources]
    parts = [(s, part) for s, part in parts if part]
    if not parts:
        raise Refused('%s is no file, section or function of these files' % args.where)
    for source, part in parts:
        taken = sorted(set(table.values()) & names_in(source, part) - set(table))
        if taken:
            raise Refused('%s: taken already: %s' % (source.name, ' '.join(taken)))
    for source, part in parts:
        new, count = rename_text(source, table, part, args.strings, args.words)
        if count:
            write(source.path, new)
        print('%s: %d renamed' % (source.name, count))
    return 0


# ---- main ----

def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    readers = {'map': command_map, 'uses': command_uses, 'circles': command_circles,
               'check': command_check}
    writers = {'rename': command_rename, 'space': command_space, 'split': command_split}
    for name in list(readers) + list(writers):
        sub = commands.add_parser(name)
        if name == 'uses':
            sub.add_argument('--write', action='store_true', help='rewrite them')
        if name == 'check':
            sub.add_argument('--only', metavar='RULES', help='some rules, with commas between them')
        if name == 'rename':
            sub.add_argument('table')
            sub.add_argument('--in', dest='where', help='a file, a section or a function')
            sub.add_argument('--strings', action='store_true', help='also inside strings')
            sub.add_argument('--words', action='store_true', help='also plain words in comments')
        sub.add_argument('files', nargs='*' if name in readers else '+')
    args = parser.parse_args(argv)
    try:
        if args.command in writers:
            return writers[args.command](args)
        paths = args.files or sorted(glob.glob(os.path.join(ROOT, 'idist*.h')))
        return int(readers[args.command](House([Source(path) for path in paths]), args))
    except Refused as e:
        print('house.py: %s' % e, file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
