#!/usr/bin/env python3
"""man.py FOLDER - writes the man pages of the API to FOLDER/man3.

The environment variable API_HEADERS lists the headers, and VERSION is the version of idist. make
docs sets both variables. There is a page for

    each function, type and macro whose name begins with idist_   its comment and its declaration
    each section, such as [api:coll]: idist_api_coll              its comment, and what it declares
    each header: idist for idist.h, otherwise its name            the comment at its top

There are no other pages: a page for a field, such as bind.3 or signal.3, would hide the system's
own page.
"""
import os
import re
import sys

from doxygen import BANNER, DECLARED, NAME, STATUS, api_lines, ends_early, paragraphs

HEAD = '.TH "%s" 3 "" "idist %s" "idist"\n.nh\n.ad l\n'


class Entry:
    """A declaration with its comment. name is None for a macro that has no page."""

    def __init__(self, lines, text):
        self.lines = lines
        self.text = text
        match = DECLARED.match(lines[0])
        name = next(filter(None, match.groups()), '') if match else ''
        self.name = name if name.startswith('idist_') else None


class Section:
    def __init__(self, header, tag, title, text):
        self.header = header
        self.tag = tag
        self.name = 'idist_%s_%s' % tag
        self.title = title
        self.text = text
        self.entries = []


class Header:
    """The comment at the top of a header, divided by its headings, and the sections of its API."""
    statuses = []  # status codes of all headers: name, value and meaning

    def __init__(self, path):
        self.path = path
        self.page = 'idist' if path == 'idist.h' else path
        self.sections = []
        self.numbers = []  # macros before the first section
        lines = api_lines(path)
        self.what = next(lines)[3:].split(' - ')[2]
        self.parts = [('DESCRIPTION', [])]
        for line in lines:
            if line == '*/':
                break
            if re.fullmatch('[A-Z][A-Z ,-]+', line):
                self.parts.append((line, []))
            else:
                self.parts[-1][1].append(re.sub('^    ', '', line))
        self.read(list(lines))

    def read(self, lines):
        pending, alone, shared = [], [], []
        at = 0
        while at < len(lines):
            line = lines[at]
            if re.match('//-{40}', line):
                at = self.banner(lines, at)
                pending, alone, shared = [], [], []
            elif re.match('//', line):
                if not line.startswith('// clang-format'):
                    pending.append(line[3:])
                at += 1
            elif not line or re.match('#(?!define)', line):
                if pending and self.sections:
                    alone = pending
                    self.sections[-1].text += [''] + alone
                pending, shared = [], []
                at += 1
            else:
                end = end_of_declaration(lines, at)
                shared = pending or shared
                self.declare(lines[at:end], shared, bool(pending), alone)
                pending = []
                at = end

    def banner(self, lines, at):
        match = BANNER.match(lines[at + 1])
        text = []
        at += 2
        while not lines[at].startswith('//-'):
            text.append(lines[at][3:])
            at += 1
        self.sections.append(Section(self, match.group(1, 2), match[3], text))
        return at + 1

    def declare(self, lines, shared, is_own, alone):
        """Adds a declaration. A comment after it is part of its text, or all of its text."""
        if not self.sections:
            if re.match(r'#define IDIST_(?!API|H$)[A-Z]\w* ', lines[0]):
                self.numbers += lines
            return
        if not re.match('IDIST_API |typedef |#define (?!IDIST__)', lines[0]):
            return
        Header.statuses += [status.groups() for status in map(STATUS.match, lines) if status]
        behind = lines[-1].partition(' // ')[2] if not lines[0].startswith('typedef') else ''
        text = [behind] if behind and not is_own else shared + (['', behind] if behind else [])
        if lines[0].startswith('IDIST_API') and alone:
            text = text + [''] + alone
        self.sections[-1].entries.append(Entry(lines, text))


def end_of_declaration(lines, at):
    """Returns the index of the line after a declaration."""
    first = lines[at]
    if re.match(r'(typedef (struct|enum) \w+|.*\)) \{$', first):
        while not lines[at].startswith('}'):
            at += 1
        return at + 1
    if first.startswith('#'):
        while lines[at].endswith('\\'):
            at += 1
        return at + 1
    while not re.search(r'[;{}]\s*(//.*)?$', lines[at]):
        at += 1
    return at + 1


def escaped(text):
    """Returns the text with all characters escaped that troff would interpret."""
    text = text.replace('\\', '\\e')
    for char, name in ('-', '\\-'), ("'", '\\(aq'), ('`', '\\(ga'), ('^', '\\(ha'), ('~', '\\(ti'):
        text = text.replace(char, name)
    return '\\&' + text if text.startswith('.') else text


def marked(text):
    """Returns the text with API names and code in bold."""
    out = ''
    for n, part in enumerate(re.split('`([^`]+)`', text)):
        if n % 2 == 1:
            out += '\\fB%s\\fR' % escaped(part)
            continue
        at = 0
        for match in NAME.finditer(part):
            out += escaped(part[at:match.start()]) + '\\fB%s\\fR' % escaped(match[0])
            at = match.end()
        out += escaped(part[at:])
    return '\\&' + out if out.startswith(('.', "'")) else out


def source(line):
    """Returns a line of code, with the code and names in its comment in bold."""
    code, slashes, behind = line.partition('//')
    return escaped(code) + slashes + (marked(behind) if behind else '')


def verbatim(lines, mark=source):
    return ''.join(['.nf\n'] + [(mark(line) or '\\&') + '\n' for line in lines] + ['.fi\n'])


def described(text):
    out = ''
    for as_is, block in paragraphs(text):
        out += '.PP\n'
        if as_is:
            is_code = any(re.search(r';$|^ *#', line) for line in block)
            out += verbatim(block, source if is_code else marked)
            continue
        for line, following in zip(block, block[1:] + ['']):
            out += marked(line) + '\n' + ('.br\n' if ends_early(line, following) else '')
    return out


def brief(text, otherwise):
    """Returns the first sentence of a text, for apropos."""
    blocks = paragraphs(text)
    if not blocks:
        return otherwise
    first = ' '.join(line.strip() for line in blocks[0][1])
    return re.split(r'(?<!\.)\.(?: |$)|:$', first)[0].replace('`', '')


def declaration(entry):
    """Returns what a program sees of a declaration: all status codes, but no private macros."""
    lines = []
    for line in entry.lines:
        if line.strip() == 'IDIST_STATUS_MAP(IDIST__X)':
            lines += ['    IDIST_%s = %s, // %s' % status for status in Header.statuses]
        elif 'IDIST__X' not in line:
            lines.append(line)
    if not lines[0].startswith('IDIST_API '):
        return lines
    lines = [line.partition(' // ')[0].rstrip() for line in lines]
    lines = [lines[0][10:]] + [re.sub('^ {10}', '', line) for line in lines[1:]]
    lines[-1] = re.sub(r' IDIST__\w+\(.*?\);$', ';', lines[-1])
    return [line for line in lines if line]


def page(name, what, synopsis, body, related):
    text = HEAD % (name, os.environ.get('VERSION', ''))
    text += '.SH NAME\n%s \\- %s\n' % (escaped(name), escaped(what))
    text += '.SH SYNOPSIS\n' + verbatim(synopsis)
    related = [other for other in dict.fromkeys(related) if other != name]
    see = ''.join('.BR %s (3)%s\n' % (escaped(other), ',' if other != related[-1] else '')
                  for other in related)
    return text + body + ('.SH SEE ALSO\n' + see if see else '')


def entry_page(section, entry, named):
    include = ['#include <%s>' % section.header.path, '']
    mentioned = [named[name] for name in NAME.findall('\n'.join(entry.lines + entry.text))
                 if name in named]
    body = '.SH DESCRIPTION\n' + described(entry.text) if entry.text else ''
    return page(entry.name, brief(entry.text, section.title),
                include + declaration(entry), body,
                [section.name] + sorted(mentioned) + [section.header.page])


def section_page(section):
    body = '.SH DESCRIPTION\n' + described(section.text) if section.text else ''
    with_page = [entry for entry in section.entries if entry.name]
    if with_page:
        body += '.SH DECLARATIONS\n'
    for entry in with_page:
        first = declaration(entry)[0].partition(' {')[0]
        body += '.TP\n.BR %s (3)\n%s\n' % (escaped(entry.name), marked(brief(entry.text, first)))
    macros = [entry for entry in section.entries if not entry.name]
    if macros:
        body += '.SH MACROS\n'
    for entry in macros:
        body += described(entry.text) + '.PP\n' + verbatim(declaration(entry))
    return page(section.name, section.title, ['#include <%s>' % section.header.path], body,
                [section.header.page] + [entry.name for entry in with_page])


def header_page(header, headers):
    body = ''
    for heading, text in header.parts:
        if ''.join(text):
            body += '.SH %s\n' % heading + described(text)
    if header.numbers:
        body += '.SH MACROS\n' + verbatim(header.numbers)
    return page(header.page, header.what, ['#include <%s>' % header.path], body,
                [section.name for section in header.sections] +
                [other.page for other in headers])


def main(folder):
    headers = [Header(path) for path in os.environ['API_HEADERS'].split()]
    sections = [section for header in headers for section in header.sections]
    named = {header.path: header.page for header in headers}
    for section in sections:
        named['[%s:%s]' % section.tag] = section.name
        named.update((entry.name, entry.name) for entry in section.entries if entry.name)

    pages = {header.page: header_page(header, headers) for header in headers}
    for section in sections:
        pages[section.name] = section_page(section)
        for entry in section.entries:
            if entry.name:  # the first entry, if several have this name
                pages.setdefault(entry.name, entry_page(section, entry, named))

    os.makedirs(folder + '/man3')
    for name, text in pages.items():
        with open('%s/man3/%s.3' % (folder, name), 'w', encoding='ascii') as file:
            file.write(text)


if __name__ == '__main__':
    main(sys.argv[1])
