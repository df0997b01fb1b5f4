#!/usr/bin/env python3
"""doxygen.py HEADER - prints the declarations of a header in the form that Doxygen expects.

For make docs, Doxygen calls this script for each header of API_HEADERS (INPUT_FILTER in
tools/Doxyfile). The script turns plain comments into Doxygen comments, and omits everything after
the declarations.

    the comment at the top    becomes a page
    the banner of a section   becomes a group with the text of the banner
    a comment before or at    describes the declaration. If the declaration in the next line has no
    the end of a declaration  comment, the comment describes that declaration, too
    a comment by itself       is added to every function up to the next such comment or the end of
                              the section

Indented paragraphs and paragraphs in columns keep their form. A line break after a line that ends
early is kept. Text in backticks is code. tools/man.py reads the same comments.
"""
import os
import re
import sys

FULL = 90  # columns that a line fills unless it ends early
END = re.compile(r'// (Only here for the API\?|The API ends here)')
BANNER = re.compile(r'// \[([a-z_]+):([a-z0-9]+)\]  (.*)')
NAME = re.compile(r'\b(?:idist|IDIST)_\w+(?:\.h)?|\bidist\.h|\[[a-z_]+:[a-z0-9]+\]')
DECLARED = re.compile(r'IDIST_API [^(]*\b(idist_\w+)\(|typedef (?:struct|enum) (idist_\w+)|'
                      r'typedef [^(]*\(\*(idist_\w+)\)|'
                      r'#define ((?!IDIST_API)IDIST_[A-Z]\w*|idist_\w+)|'
                      r'    (IDIST_[A-Z]\w*) *[,=]|    (IDIST_[A-Z]\w*)$')
STATUS = re.compile(r' *X\((\w+), (-?\d+), "(.*)"\)')


def api_lines(path):
    """Yields the lines up to the end of the declarations."""
    with open(path, encoding='ascii') as file:
        for line in file:
            if END.match(line):
                return
            yield line.rstrip('\n')


def past_top(lines):
    for line in lines:
        if line == '*/':
            return lines
    return lines


def link_targets(paths):
    """Returns a dict of the names that a text can mention, with Doxygen's name for each."""
    targets = {}
    for path in paths:
        targets[path] = 'index' if path == 'idist.h' else path.replace('.', '_')
        for line in past_top(api_lines(path)):
            banner, declared, status = BANNER.match(line), DECLARED.match(line), STATUS.match(line)
            if banner:
                targets['[%s:%s]' % banner.group(1, 2)] = '%s_%s' % banner.group(1, 2)
            if declared:
                name = next(filter(None, declared.groups()))
                targets[name] = name
            if status:
                targets['IDIST_' + status[1]] = 'IDIST_' + status[1]
    return targets


TARGETS = link_targets(os.environ['API_HEADERS'].split())


def escaped(text):
    text = re.sub(r'[\\@&$#<>%"]|--|::', r'\\\g<0>', text)
    text = text.replace('file://', 'file:<span></span>//')  # not a link
    return text.replace('.. ', '..&nbsp;')  # not the end of the brief description


def linked(text):
    """Returns the text with links and code. Escapes what Doxygen would take for a command."""
    parts = re.split('`([^`]+)`', text)
    code = ['<code>%s</code>' % with_links(part) for part in parts[1::2]] + ['']
    return ''.join(with_links(part) + span for part, span in zip(parts[::2], code))


def no_list(line):
    """Returns a line of a paragraph that keeps its form. A dash in front must not begin a list."""
    return re.sub('^( *)-(?= )', r'\1<span></span>-', line)


def with_links(text):
    out, at = '', 0
    for match in NAME.finditer(text):
        out += escaped(text[at:match.start()])
        target = TARGETS.get(match[0])
        out += '\\ref %s "%s"' % (target, match[0]) if target else match[0]
        at = match.end()
    return out + escaped(text[at:])


def whole_spans(block):
    """Yields the lines of a paragraph. Code that continues in the next line is code in both."""
    is_open = False
    for line in block:
        line = '`' * is_open + line
        is_open = line.count('`') % 2 == 1
        yield line + '`' * is_open


def ends_early(line, following):
    return re.search('[.:]$', line) and following and \
        len(line) + len(following.split()[0]) < FULL


def paragraphs(lines):
    """Returns the paragraphs: whether each keeps its form, and its lines.

    Joins adjacent paragraphs that keep their form.
    """
    result = []
    for block in re.split(r'\n\n+', '\n'.join(lines).strip('\n')):
        block = list(whole_spans(block.split('\n')))
        as_is = any(re.match(' ', line) or re.search(r'\S {3,}\S', line) for line in block)
        if as_is and result and result[-1][0]:
            result[-1][1].extend([''] + block)
        elif block != ['']:
            result.append((as_is, block))
    return result


def describe(lines):
    """Returns a text as the lines of a Doxygen comment."""
    out = []
    for as_is, block in paragraphs(lines):
        if as_is and any(re.search(r';$|^ *#', line) for line in block):
            out += ['', '\\code{.c}'] + block + ['\\endcode']
        elif as_is:
            out += ['', '<pre>'] + [no_list(linked(line)) for line in block] + ['</pre>']
        else:
            out.append('')
            for line, following in zip(block, block[1:] + ['']):
                out += [linked(line)] + ([''] if ends_early(line, following) else [])
    return out[1:]


def comment(lines):
    return ''.join('/// %s\n' % line for line in lines)


class Filter:
    def __init__(self, path):
        self.path = os.path.basename(path)
        self.out = []
        self.pending = []  # a comment that waits for its declaration
        self.alone = []  # a comment that stands by itself
        self.shared = [[], []]  # the comment that declarations share, outside of structs and inside
        self.depth = 0  # 1: in a struct or an enum
        self.unclosed = 0  # number of unclosed parentheses
        self.within = False  # the last declaration continues
        self.in_group = False
        self.statuses = []

    def run(self):
        lines = api_lines(self.path)
        self.top(next(lines)[3:], lines)
        for line in lines:
            if re.match('//-{40}', line):
                self.banner(lines)
            elif re.match(r' *// clang-format', line):
                continue
            elif re.match(r' *//', line):
                self.pending.append(line.strip()[3:])
            elif not line:
                self.blank()
            elif line.startswith('#') and not line.startswith('#define'):
                self.out.append(line + '\n')
                self.shared[self.depth] = []
            elif not self.status(line):
                self.declaration(line)
        self.end_group()
        sys.stdout.write(''.join(self.out))

    def top(self, title, lines):
        """Writes the comment at the top of the file."""
        kind = 'mainpage' if self.path == 'idist.h' else 'page ' + TARGETS[self.path]
        name, _, what = title.split(' - ')[:3]
        self.out.append(comment(['\\%s %s: %s' % (kind, name, what.replace('`', ''))]))
        part = []
        for line in lines:
            if line == '*/' or re.fullmatch('[A-Z][A-Z ,-]+', line):
                self.out.append(comment([''] + describe(part)))
                part = []
                if line == '*/':
                    return
                anchor = re.sub('[^a-z]', '_', self.path[:-2] + ' ' + line.lower())
                self.out.append(comment(['', '\\section %s %s' % (anchor, line)]))
            else:
                part.append(re.sub('^    ', '', line))

    def banner(self, lines):
        self.end_group()
        match = BANNER.match(next(lines))
        text = []
        for line in lines:
            if line.startswith('//-'):
                break
            text.append(line[3:])
        group = '\\defgroup %s_%s %s: %s' % (match[1], match[2], self.path,
                                            match[3].replace('`', ''))
        self.out.append(comment([group, ''] + describe(text) + ['\\{']) + '\n')
        self.in_group = True

    def end_group(self):
        if self.in_group:
            self.out.append('\n///\\}\n')
        self.in_group = False
        self.alone = []

    def blank(self):
        if self.pending:
            self.alone = self.pending
        self.pending = []
        self.shared[self.depth] = []
        self.out.append('\n')

    def status(self, line):
        """Turns the list of status codes into the enum that it stands for."""
        match = STATUS.match(line)
        if match:
            self.statuses.append('    /// %s\n    IDIST_%s = %s,\n' % (
                linked(match[3]), match[1], match[2]))
        elif 'IDIST_STATUS_MAP(IDIST__X)' in line:
            self.out.extend(self.statuses)
            return True
        return line.startswith('#define IDIST__X')

    def declaration(self, line):
        """Writes a line of code. Its comment, before it or at its end, goes before it."""
        code, _, behind = line.partition(' // ')
        code = code.rstrip()
        if code.startswith('}'):
            self.depth = self.unclosed = 0
        elif not self.within:
            if self.pending or (self.depth and behind):
                self.shared[self.depth] = self.pending
            text = self.shared[self.depth] + ['', behind]
            if behind and not self.pending:
                text = [behind]
            if self.alone and code.startswith('IDIST_API'):
                text += [''] + self.alone
            self.out.append(comment(describe(text)))
            self.pending = []
        if re.match(r'typedef (struct|enum) \w+ \{', code):
            self.depth = 1
            self.shared[1] = []
        self.unclosed += code.count('(') - code.count(')')
        ends = ';{},' if self.depth and self.unclosed == 0 else ';{}'
        self.within = code.endswith('\\') or not (code.startswith('#') or code[-1] in ends)
        self.out.append(code + '\n')


if __name__ == '__main__':
    Filter(sys.argv[1]).run()
