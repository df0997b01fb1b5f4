#!/usr/bin/env python3
"""house.py [--only RULE,..] [FILES] - checks the house rules. Exits with 1 if a rule is broken.

Without FILES, checks the headers in src/. Reads each file as text, with a tokenizer and a parser of
statements that know only the C that idist uses. So names are found in all branches of #if.

Rules:
    prefix      a private function idist__PREFIX_verb whose prefix is not the name of its file, a
                type that the file defines, or a prefix from a line "// Functions: ..." in its head;
                a prefix of two files. (All files of os/ share the prefix idist__os_.)
    includes    a file of src/ that does not include what it uses, or includes what it does not use
    decl        no blank line after the declarations that open a function
    columns     a line over 100 columns
    length      a function of more than 60 lines
    nesting     more than 4 levels of if, for, while, do and switch
    branches    more than 25 of if, for, while, case, &&, || and ?: in a function
    blank       less than 8 % blank lines in the functions of a file that have 8 lines or more
    statements  several statements on one line: a; b; or a, b; (case X: a; break; is allowed)
    chain       if ((s = f()) != IDIST_OK) return s;
    comment     a comment that names an identifier of idist which does not exist
    launchers   a list of launchers in idist.h that differs from the table in launch/detect.h
    system      an include, a name or a path of the operating system outside os/
    cancel      a cancellation point in os/ that is not inside IDIST__OS_CALL
    locale      a number with a fraction, printed or read with the locale's decimal point
    parse       a function that this script does not understand
"""
import argparse
import bisect
import glob
import os
import re
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))

MAX_COLUMNS = 100
MAX_LENGTH = 60
MAX_NESTING = 4
MAX_BRANCHES = 25
MIN_BLANK = 8.0     # percent of blank lines in the long functions of a file
BLANK_LINES = 8     # lines of a long function, including blank lines
BLANK_FROM = 60     # lines in the long functions of a file, from which on the rule applies
DECL_LINES = 6      # lines of a function, without blank lines, from which on rule decl applies
# The folder that may use the operating system, and the headers that other files may include: the C
# standard library, and for each file the headers that are not part of a system.
SYSTEM_FOLDER = 'os/'
C_HEADERS = set('''assert ctype errno float inttypes limits locale math stdarg stdatomic stdbool
    stddef stdint stdio stdlib string'''.split())
OTHER_HEADERS = {
    'base/begin.h': ['exception', 'cxxabi.h'], # of C++: IDIST__CATCH
    'base/isa.h': ['cpuid.h'],                  # of the compiler: what the processor can do
    'idist_mpi.h': ['mpi.h', 'mpi-ext.h'],      # of MPI
    'idist_nccl.h': ['cuda_runtime_api.h'],     # of CUDA
}

# Functions of the system, if they are called by name: transport->read is not a call of read.
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
# Other names of the system, wherever they occur.
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
# Functions and formats that depend on the decimal point of the program's locale. Only LOCALE_FILE
# may use them.
LOCALE_CALLS = set('atof strtod strtof strtold'.split())
LOCALE_FORMAT = re.compile(r'%(?:%|[-+#0-9.*]*[lL]?[aefgAEFG])')
LOCALE_FILE = 'base/text.h'

SYSTEM_PATH = re.compile(r'"/(proc|dev|sys|run|tmp|etc)/')

RULES = ['prefix', 'includes', 'decl', 'columns', 'length', 'nesting', 'branches', 'blank',
         'statements', 'chain', 'comment', 'launchers', 'system', 'cancel', 'locale', 'parse']

TYPE_WORDS = set('''auto bool char const double enum extern float int long register short signed
    static struct typedef union unsigned void volatile'''.split())
ATTRIBUTES = {'__attribute__', 'IDIST__UNUSED', 'IDIST__TLS'}
CONTROL = {'if', 'for', 'while', 'do', 'switch', 'else'}


class Refused(Exception):
    """Raised with the reason if the script cannot do its work."""


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
    """Returns two lists of tokens (kind, text, position): the code, in which a directive is one
    token, and the comments."""
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
    """Returns the tokens of a directive, with positions relative to its '#'."""
    return lex(token[1], PP_TOKEN)


def spelling(text):
    """Returns what must stay equal if only white space changes. Splits directives into tokens."""
    code, comments = lex(text)
    tokens = []
    for kind, word, _ in code:
        tokens += [t for _, t, _ in lex(word, PP_TOKEN)[0]] if kind == 'pp' else [word]
    return tokens, [re.sub(r'\s+', ' ', t) for _, t, _ in comments]


# ---- statements ----

class Statement:
    """A statement. first and last are indices of tokens. children holds the statements of a block,
    or the bodies of a control statement."""

    def __init__(self, kind, first):
        self.kind, self.first, self.last, self.children = kind, first, first, []
        self.head = None    # indices of the parentheses of if, for, while, do or switch

    def walk(self, parent=None):
        yield self, parent
        for child in self.children:
            yield from child.walk(self)


class Misread(Exception):
    pass


def closing(code, i):
    """Returns the index of the token that closes the bracket at i."""
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
        """Returns true for a macro on a line of its own without a semicolon: IDIST__CO_BEGIN(o)."""
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

class Item:
    """Something at file scope: the tokens first..last, and the names that it declares."""

    def __init__(self, kind, name, first, last, body=None):
        self.kind, self.name, self.first, self.last, self.body = kind, name, first, last, body
        self.tree = None    # of a function: the block of its body
        self.names = []     # (name, kind): function proto type forward constant variable macro


class Source:
    def __init__(self, path, text=None):
        if text is None:
            with open(path, encoding='utf-8') as f:
                text = f.read()
        at = os.path.relpath(path, os.path.join(ROOT, 'src'))
        self.path, self.text = path, text
        self.name = os.path.basename(path) if at.startswith('..') else at
        self.lines = text.split('\n')
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.code, self.comments = lex(text)
        self.items = self.find_items()
        self.misread = []
        self.functions = [item for item in self.items if item.kind == 'function']
        for item in self.functions:
            try:
                item.tree = Parser(self).block(item.body)
            except (Misread, IndexError) as e:
                self.misread.append((item, str(e)))

    def line(self, position):
        """Returns the number of the line, from 1."""
        return bisect.bisect_right(self.starts, position)

    def first_line(self, x):
        return self.line(self.code[x.first][2])

    def last_line(self, x):
        kind, word, at = self.code[x.last]
        return self.line(at + len(word) - 1)

    def body_lines(self, item):
        """Returns the lines between the braces of a function."""
        return self.lines[self.line(self.code[item.body][2]):self.last_line(item) - 1]

    # Items at file scope.

    def find_items(self):
        items, i = [], 0
        while i < len(self.code):
            item = self.item_at(i)
            i = item.last + 1
            self.name_item(item)
            items.append(item)
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
        """Returns the first name before an outermost parenthesis. Skips attributes and macros."""
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
        """Returns the names that a typedef or a variable declares."""
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
        """Returns the names in an item, without members and without the names that it defines."""
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


# ---- rules ----

def blank_share(source, functions):
    lines = blank = 0
    for item in functions:
        body = source.body_lines(item)
        if len(body) >= BLANK_LINES:
            lines += len(body)
            blank += sum(not line.strip() for line in body)
    return lines, 100.0 * blank / lines if lines else 0.0


def owners_of(sources):
    """Returns the files of each prefix. A type is a prefix, too, if no file has its name."""
    owners, types = {}, {}
    for source in sources:
        folder, stem = os.path.split(source.name[:-2])
        prefixes = ['os' if folder.split('/')[0] == 'os' else stem]
        for line in re.findall(r'^// Functions: (.*)\.$', source.text, re.M):
            prefixes += re.findall(r'idist__(\w+)_\*', line)
        for prefix in prefixes:
            owners.setdefault(prefix, set()).add(source.name)
        for item in source.items:
            types.update((name[len('idist__'):], {source.name}) for name, kind in item.names
                         if kind == 'type' and name.startswith('idist__')
                         and prefixes[0] != 'os')
    return {**types, **owners}


def rule_prefix(sources, known):
    owners = owners_of(sources)
    for source in sources:
        for item in source.functions:
            words = item.name[len('idist__'):].split('_')
            found = [p for p in ('_'.join(words[:n]) for n in range(len(words), 0, -1))
                     if p in owners] if item.name.startswith('idist__') else []
            if item.name.startswith('idist__') and not found:
                yield source, source.first_line(item), '%s: no file has this prefix' % item.name
            elif found and source.name not in owners[found[0]]:
                yield source, source.first_line(item), '%s has the prefix of %s' % (
                    item.name, ' and '.join(sorted(owners[found[0]])))
    for prefix, files in sorted(owners.items()):
        if len(files) > 1 and prefix != 'os':
            source = [s for s in sources if s.name in files][-1]
            yield source, 1, 'idist__%s_ belongs to %s' % (prefix, ' and '.join(sorted(files)))


def home_of(source, item):
    """Returns the file to include for what an item declares. In os/linux/types.h and similar files,
    a mark above the types names the file of os/ to which they belong."""
    above = source.text[:source.starts[source.first_line(item) - 1]]
    marks = re.findall(r'^// ---- for (\w+\.h) ----$', above, re.M)
    return 'os/' + marks[-1] if marks and re.match(r'os/\w+/types\.h', source.name) else source.name


def rule_includes(sources, known):
    """The names that src/*.h and files without a guard define are available everywhere. The files
    of train/ need not include gpu/ or xla/: idist_train.h uses device memory only if the program
    has included idist_nccl.h or idist_xla.h before."""
    parts = [s for s in sources if '/' in s.name and '#pragma once' in s.text]
    everywhere = {name for s in sources if s not in parts for item in s.items
                  for name, _ in item.names}
    homes, names = {}, {s.name: set() for s in parts}
    for source in parts:
        for item in source.items:
            for name, _ in item.names:
                if name.startswith(('idist__', 'IDIST__')) and name not in everywhere:
                    homes.setdefault(name, set()).add(home_of(source, item))
                    names[home_of(source, item)].add(name)
    for source in parts:
        if source.name.endswith('/types.h'):
            continue
        contract = re.sub(r'^os/\w+/', 'os/', source.name) # that a body implements
        free = {source.name, contract, 'os/system.h'}
        included = set(re.findall(r'^#include "([^"]+)"', source.text, re.M))
        used = {}
        for item in source.items:
            for name, at in source.names_used(item).items():
                used.setdefault(name, source.line(at))
        for name, line in sorted(used.items(), key=lambda x: x[1]):
            files = homes.get(name, set())
            is_other = source.name.startswith('train/') and \
                all(f[:4] in ('gpu/', 'xla/') for f in files)
            if files and not files & (included | free) and not is_other:
                yield source, line, '%s is in %s' % (name, ' and '.join(sorted(files)))
        for file in sorted((included & set(names)) - free):
            if not names[file] & set(used) and not re.match(r'os/\w+/', file):
                yield source, 1, 'nothing of %s is used' % file


def rule_decl(sources, known):
    for source in sources:
        for item in source.functions:
            if item.tree and after_declarations(source, item) and \
                    not has_blank(source, *after_declarations(source, item)):
                line = source.first_line(after_declarations(source, item)[1])
                yield source, line, 'no blank line after the declarations of %s' % item.name


def rule_columns(sources, known):
    for source in sources:
        for i, line in enumerate(source.lines):
            if len(line) > MAX_COLUMNS:
                yield source, i + 1, '%d columns' % len(line)


def rule_length(sources, known):
    for source in sources:
        for item in source.functions:
            n = len(source.body_lines(item))
            if n > MAX_LENGTH:
                yield source, source.first_line(item), '%s has %d lines' % (item.name, n)


def nesting(s, depth=0):
    """Returns the deepest level of control in a statement. else if has the level of its if."""
    deeper = depth + (s.kind in CONTROL)
    most = deeper
    for i, child in enumerate(s.children):
        is_else_if = s.kind == 'if' and i == 1 and child.kind == 'if'
        most = max(most, nesting(child, depth if is_else_if else deeper))
    return most


def rule_nesting(sources, known):
    for source in sources:
        for item in source.functions:
            n = nesting(item.tree) if item.tree else 0
            if n > MAX_NESTING:
                yield source, source.first_line(item), '%s has %d levels' % (item.name, n)


def rule_branches(sources, known):
    words = {'if', 'for', 'while', 'case', '&&', '||', '?'}
    for source in sources:
        for item in source.functions:
            n = sum(word in words for _, word, _ in source.code[item.body:item.last])
            if n > MAX_BRANCHES:
                yield source, source.first_line(item), '%s has %d branches' % (item.name, n)


def rule_blank(sources, known):
    for source in sources:
        lines, share = blank_share(source, source.functions)
        if lines >= BLANK_FROM and share < MIN_BLANK:
            yield source, 1, '%.1f %% of the lines of its functions are blank' % share


def rule_statements(sources, known):
    for source in sources:
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


def rule_chain(sources, known):
    for source in sources:
        for item in source.functions:
            for s, _ in item.tree.walk() if item.tree else ():
                if s.kind == 'if':
                    words = [t[1] for t in source.code[s.head[0]:s.head[1]]]
                    if '=' in words and 'IDIST_OK' in words:
                        yield source, source.first_line(s), 'a status assigned inside if'


def rule_comment(sources, known):
    for source in sources:
        for _, text, at in source.comments:
            for match in re.finditer(r'(?<![\w/.-])_?(?:idist|IDIST)_\w*', text):
                name, rest = match.group(), text[match.end():match.end() + 2]
                if name in known.names or known.makes(name) or re.match(r'\.[ch]', rest):
                    continue
                if (rest[:1] in ('*', '<') or name.endswith('_')) and known.begins(name):
                    continue
                yield source, source.line(at + match.start()), 'no such thing as %s' % name


def table_of_launchers(source):
    """Returns the launchers in order, none first, and the pairs of a rank and a size variable in
    the rows of idist__launchers."""
    table = source.text.split('idist__launchers[] = {', 1)[1].split('};', 1)[0]
    rows = re.findall(r'\{(IDIST__LAUNCHER_\w+),\s*(?:NULL|"(\w+)"),\s*"(\w+)",\s*"(\w+)"', table)
    names = ['none']
    for kind, name, _, _ in rows:
        if name and name not in names:
            names += [name] + (['torchrun'] if kind == 'IDIST__LAUNCHER_ENV' else [])
    return names, [(rank, size) for _, _, rank, size in rows]


def documented_launchers(source):
    """Returns the launchers and the pairs that idist.h documents, and the lines of both lists."""
    chosen = re.search(r'IDIST_LAUNCHER selects[^:]*:\s*([^.]*)\.', source.text)
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


def rule_launchers(sources, known):
    named = {source.name: source for source in sources}
    if not {'idist.h', 'launch/detect.h'} <= set(named):
        return
    api = named['idist.h']
    names, pairs = table_of_launchers(named['launch/detect.h'])
    doc_names, doc_pairs, names_line, pairs_line = documented_launchers(api)
    if doc_names != names:
        yield api, names_line, 'IDIST_LAUNCHER: the table has ' + ', '.join(names)
    if doc_pairs != pairs:
        yield api, pairs_line, 'the table has ' + '; '.join(', '.join(p) for p in pairs)


def all_tokens(source):
    """Yields the tokens of the code. Splits directives into their tokens."""
    for kind, word, at in source.code:
        if kind == 'pp':
            yield from ((k, w, at + a) for k, w, a in lex_directive((kind, word, at))[0])
        else:
            yield kind, word, at


def system_uses(source):
    """Yields the uses of the operating system in a header, as pairs of a line and a text."""
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


def rule_system(sources, known):
    for source in sources:
        if source.name.startswith(SYSTEM_FOLDER):
            continue
        for line, what in system_uses(source):
            yield source, line, '%s belongs in %s' % (what, SYSTEM_FOLDER)


def rule_cancel(sources, known):
    """At a cancellation point, pthread_cancel could end a thread that holds a lock."""
    for source in sources:
        if not source.name.startswith(SYSTEM_FOLDER):
            continue
        depth, wrapped = 0, None  # parentheses around a token; depth at IDIST__OS_CALL
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


def rule_locale(sources, known):
    for source in sources:
        for kind, word, at in all_tokens(source):
            line = source.line(at)
            if source.name == LOCALE_FILE:
                continue
            found = [word + '()'] if kind == 'name' and word in LOCALE_CALLS else []
            if kind == 'string':
                found = [f for f in LOCALE_FORMAT.findall(word) if f != '%%']
            for what in found:
                yield source, line, '%s depends on the locale; use %s' % (what, LOCALE_FILE)


def rule_parse(sources, known):
    for source in sources:
        for item, why in source.misread:
            yield source, source.first_line(item), '%s: %s' % (item.name, why)


class Known:
    """Every identifier of idist that occurs outside the comments of the headers."""

    def __init__(self, sources):
        self.names, self.words, self.pasted = set(), set(), set()
        for source in sources:
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
        """Returns true if an X-macro makes the name, as IDIST_##name makes IDIST_ERR_SYSTEM."""
        return any(name.startswith(p) and name[len(p):] in self.words for p in self.pasted)

    def begins(self, name):
        i = bisect.bisect_left(self.sorted, name)
        return i < len(self.sorted) and self.sorted[i].startswith(name)


def has_blank(source, a, b):
    """Returns true if there is a blank line between two statements."""
    between = source.lines[source.last_line(a):source.first_line(b) - 1]
    return any(not line.strip() for line in between)


def solid(source, x):
    """Returns the number of lines of a statement that are not blank."""
    lines = source.lines[source.first_line(x) - 1:source.last_line(x)]
    return sum(bool(line.strip()) for line in lines)


def after_declarations(source, item):
    """Returns the last declaration at the start of a function, and the statement after it. Returns
    None if there is none, or if the function is short."""
    if sum(bool(line.strip()) for line in source.body_lines(item)) < DECL_LINES:
        return None
    children = item.tree.children
    for a, b in zip(children, children[1:]):
        if a.kind != 'decl':
            return None
        if b.kind != 'decl':
            return (a, b) if b.kind != 'pp' else None
    return None


def commas(source, s):
    """Returns the indices of the commas that join several expressions in a statement."""
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


# ---- main ----

def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', metavar='RULES', help='some rules, with commas between them')
    parser.add_argument('files', nargs='*')
    args = parser.parse_args(argv)
    only = args.only.split(',') if args.only else RULES
    paths = args.files or sorted(glob.glob(ROOT + '/src/**/*.h', recursive=True))
    count = 0
    try:
        if not set(only) <= set(RULES):
            raise Refused('no rule %s; there are: %s' % (args.only, ' '.join(RULES)))
        sources = [Source(path) for path in paths]
        known = Known(sources) if 'comment' in only else None
        for rule in only:
            for source, line, text in globals()['rule_' + rule](sources, known):
                print('%s:%d: %s: %s' % (source.name, line, rule, text))
                count += 1
    except Refused as e:
        print('house.py: %s' % e, file=sys.stderr)
        return 2
    return int(count > 0)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
