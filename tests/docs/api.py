#!/usr/bin/env python3
"""api.py DOCS HEADER... - compares what make docs wrote with the headers; prints what is wrong.

    lost        a line of a comment among the declarations that is on no page
    function    without an anchor, its declaration, a description or a man page
    link        to a place of a page that does not exist, or to a file:///path of an explanation
"""
import glob
import html
import os
import re
import sys

DOCS, *HEADERS = sys.argv[1:]


def squeezed(text):
    """The text without spaces: lines are broken elsewhere on a page."""
    return re.sub(r'\s', '', text)


def text_of(page):
    return squeezed(html.unescape(re.sub(r'<[^>]*>', '', page)))


def declarations(path):
    """The part of a header that Doxygen gets, but for its first line, which is split there."""
    with open(path, encoding='ascii') as file:
        text = file.read()
    return re.split(r'\n// (?:Only here for the API|The API ends here)', text)[0].split('\n', 1)[1]


def comment_lines(text):
    yield from text.split('*/')[0].split('\n')
    for line in text.split('extern "C" {')[1].split('\n'):
        comment = re.match(r'(?![#}]).*?(?:^|\s)// ?(.*)', line)
        if comment and not comment[1].startswith('clang-format'):
            yield re.sub(r'^\[\w+:\w+\]', '', comment[1])


def functions(text):
    """Each function: name, declaration, and the lines of the comment before it."""
    pattern = r'((?:^//.*\n)*)^IDIST_API ([^;]*?(\w+)\([^;]*?\))(?: IDIST__\w+\(.*?\))?;'
    for match in re.finditer(pattern, text, re.M):
        yield match[3], squeezed(match[2]), match[1].split('\n')[:-1]


def documented(page):
    """Each function on a page: name, declaration and description."""
    for part in page.split('<h2 class="memtitle">')[1:]:
        name = re.match(r'<span class="permalink"><a href="#(\w+)">.*?</a></span>(\w+)\(\)', part)
        match = re.search(r'<div class="memproto">(.*?)</div><div class="memdoc">(.*)', part, re.S)
        if name and match and 'id="%s"' % name[1] in page:
            yield name[2], text_of(match[1]), text_of(match[2].split('\n</div>\n</div>')[0])


pages = {}
for file in glob.glob(DOCS + '/html/*.html'):
    with open(file, encoding='utf-8') as page:
        pages[os.path.basename(file)] = page.read()
everything = ''.join(text_of(page) for page in pages.values())
found = {}
for page in pages.values():
    found.update({name: rest for name, *rest in documented(page)})

n_functions = n_lines = n_links = 0
for header in HEADERS:
    part = declarations(header)
    for line in comment_lines(part):
        n_lines += 1
        if squeezed(line) not in everything and not re.fullmatch('-*', line):
            print('lost: %s: %s' % (header, line))
    for name, declaration, comment in functions(part):
        n_functions += 1
        shown, description = found.get(name, ('', ''))
        if shown != declaration:
            print('function: %s has the declaration "%s"' % (name, shown))
        if not description:
            print('function: %s has no description' % name)
        for line in comment:
            if squeezed(line[2:]) not in description:
                print('function: %s lacks "%s"' % (name, line))
        if not os.path.exists('%s/man/man3/%s.3' % (DOCS, name)):
            print('function: %s has no man page' % name)

for name, page in pages.items():
    for target in re.findall(r'href="([^":]*#[^"]+)"', page):
        n_links += 1
        file, anchor = target.split('#', 1)
        if not re.search(r'\b(id|name)="%s"' % re.escape(anchor), pages.get(file or name, '')):
            print('link: %s: %s does not exist' % (name, target))
    for target in re.findall(r'href="(file:[^"]*)"', page):
        print('link: %s: %s is an example' % (name, target))
print('%d functions, %d lines of comments, %d links to places' % (n_functions, n_lines, n_links),
      file=sys.stderr)
