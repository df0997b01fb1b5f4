#!/usr/bin/env python3
"""api.py DOCS HEADER... - compares the output of make docs with the headers; prints what is wrong.

    lost        a line of a comment among the declarations that is on no page, or on no man page
    code        text in backticks in a comment that is not shown as code
    function    a function without an anchor, its declaration or its description; a man page without
                the declaration or the description
    name        a man page whose name does not begin with idist_
    link        a link to a place that does not exist on a page, or to a file:///path that is only
                an example in a comment; a reference to a man page that does not exist
    troff       a message of the formatter about a man page
"""
import glob
import html
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

DOCS, *HEADERS = sys.argv[1:]


def squeezed(text):
    """Returns the text without white space, because a page breaks its lines elsewhere."""
    return re.sub(r'\s', '', text)


def plain(comment):
    """Returns a line of a comment as a page shows it, squeezed."""
    return squeezed(comment.replace('`', ''))


def rendered(file):
    """Returns a man page as a reader sees it. Prints the messages of the formatter."""
    run = subprocess.run(['man', '--warnings=w', '--nh', '--nj', '-E', 'ascii', '-l', file],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False,
                         env={**os.environ, 'MANWIDTH': '1000', 'MANPAGER': 'cat'},
                         universal_newlines=True)
    if run.returncode != 0 or run.stderr:
        print('troff: %s: %s' % (file, run.stderr.strip() or run.returncode))
    return run.stdout


def text_of(page):
    return squeezed(html.unescape(re.sub(r'<[^>]*>', '', page)))


def declarations(path):
    """Returns the part of a header that Doxygen reads, without the line that Doxygen splits."""
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
    """Yields the name, the declaration and the comment lines of each function."""
    pattern = r'((?:^//.*\n)*)^IDIST_API ([^;]*?(\w+)\([^;]*?\))(?: IDIST__\w+\(.*?\))?;'
    for match in re.finditer(pattern, text, re.M):
        yield match[3], squeezed(match[2]), match[1].split('\n')[:-1]


def documented(page):
    """Yields the name, the declaration and the description of each function on a page."""
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
code = {text_of(span) for page in pages.values()
        for span in re.findall('<code>(.*?)</code>', page, re.S)}
found = {}
for page in pages.values():
    found.update({name: rest for name, *rest in documented(page)})

files = sorted(glob.glob(DOCS + '/man/man*/*'))
with ThreadPoolExecutor(os.cpu_count()) as pool:
    man = dict(zip((os.path.basename(file)[:-len('.3')] for file in files),
                   pool.map(rendered, files)))
everything_in_man = ''.join(map(squeezed, man.values()))

n_functions = n_lines = n_links = 0
for header in HEADERS:
    part = declarations(header)
    for line in comment_lines(part):
        n_lines += 1
        if re.fullmatch('-*', line):
            continue
        if plain(line) not in everything:
            print('lost: %s: %s' % (header, line))
        if plain(line) not in everything_in_man:
            print('lost: %s: %s: on no man page' % (header, line))
        for span in re.findall('`([^`]+)`', line):
            if squeezed(span) not in code:
                print('code: %s: `%s`' % (header, span))
    for name, declaration, comment in functions(part):
        n_functions += 1
        shown, description = found.get(name, ('', ''))
        if shown != declaration:
            print('function: %s has the declaration "%s"' % (name, shown))
        if not description:
            print('function: %s has no description' % name)
        for line in comment:
            if plain(line[2:]) not in description:
                print('function: %s lacks "%s"' % (name, line))
        on_man_page = squeezed(man.get(name, ''))
        for part_of_page in [declaration + ';'] + [plain(line[2:]) for line in comment]:
            if part_of_page not in on_man_page:
                print('function: %s: the man page lacks "%s"' % (name, part_of_page))

for name, page in pages.items():
    for target in re.findall(r'href="([^":]*#[^"]+)"', page):
        n_links += 1
        file, anchor = target.split('#', 1)
        if not re.search(r'\b(id|name)="%s"' % re.escape(anchor), pages.get(file or name, '')):
            print('link: %s: %s does not exist' % (name, target))
    for target in re.findall(r'href="(file:[^"]*)"', page):
        print('link: %s: %s is an example' % (name, target))
for name, page in man.items():
    if name != 'idist' and not name.startswith('idist_'):
        print('name: %s' % name)
    related = page.partition('\nSEE ALSO\n')[2].rpartition('\n\n')[0]
    if not re.search(r'\bidist(_\w+_\w+|)\(3\)', related):
        print('link: the man page %s names no group' % name)
    for target in re.findall(r'([\w.]+)\(3\)', page):
        n_links += 1
        if target not in man:
            print('link: the man page %s: %s does not exist' % (name, target))
print('%d functions, %d lines of comments, %d links to places' % (n_functions, n_lines, n_links),
      file=sys.stderr)
