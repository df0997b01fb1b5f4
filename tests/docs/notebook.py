#!/usr/bin/env python3
"""notebook.py KERNEL PART PAGE FOLDER - runs cells of docs/notebook.md in a kernel, c or python.

FOLDER contains what the page puts beside the notebook. The parts:

    cells   nbclient executes the notebook; the cells must print what the page says
    stop    an endless training is interrupted, restarted and shut down with jupyter_client
    kill    the kernel is killed during an endless training

After each event, no process of the training may be left, and no file but the kernel's own. Prints a
line for each check, and exits with 1 if a check failed. Every wait has a deadline.
"""
import os
import re
import signal
import sys
import time
from queue import Empty

import nbclient
import nbformat
from jupyter_client import KernelManager

KERNEL, PART, PAGE, FOLDER = sys.argv[1:]
NAME = {'c': 'c', 'python': 'python3'}[KERNEL]
DEADLINE = 30 # seconds
MARK = 'IDIST_TEST_NOTEBOOK=%d' % os.getpid() # in the environment of every process of the kernel
N_RANKS = 2

failed = 0
clients = []


def ok(passed, name, *details):
    """Prints the result of a check, and details of a failure."""
    global failed
    print('%s - %s' % ('ok' if passed else 'not ok', name), flush=True)
    if not passed:
        failed += 1
        print(*details, sep='\n', flush=True)


# ---- the page ----

with open(PAGE, encoding='ascii') as page:
    TEXT = page.read()


def blocks(language):
    return re.findall(r'^```%s\n(.*?)^```$' % language, TEXT, re.M | re.S)


def changed(text, old, new):
    assert text.count(old) == 1, '%s: "%s" is not there once' % (PAGE, old)
    return text.replace(old, new)


def shown_after(text):
    """Returns the lines of output that the page shows after a text."""
    shown = re.search(r'\n\n((?:    .*\n)+)', TEXT[TEXT.index(text) + len(text):])[1]
    return [line.strip() for line in shown.splitlines()]


TRAINING, FAILURE = blocks('c')
(RUN,) = blocks('python')
CRASH = changed(FAILURE, 'idist_set_last_error("samples-1.csv is not here");',
                '*(volatile int *)0 = 1;')
# Prints one line and then no more, so that no closed pipe ends the program.
ENDLESS = changed(changed(TRAINING, 'EPOCHS = 10', 'EPOCHS = 1000000000'), 'epoch % 3', 'epoch')


def cells_of(program):
    """Returns the cells that run a program in this kernel."""
    return [program] if KERNEL == 'c' else ['%%writefile train.c\n' + program, RUN]


HELLO = {'c': """//%cflags: -std=gnu11
#include <unistd.h>
int main(void) { return write(1, "hello\\n", 6) < 0 || usleep(200 * 1000); }
""", 'python': 'print("hello")'}[KERNEL]


# ---- processes and files ----

def processes():
    """Returns the command lines of the running processes of the kernel, by process id."""
    found = {}
    for name in os.listdir('/proc'):
        try:
            with open('/proc/%s/environ' % name, 'rb') as file: # a zombie has none
                if MARK.encode() not in file.read().split(b'\0'):
                    continue
            with open('/proc/%s/cmdline' % name, 'rb') as file:
                found[int(name)] = file.read().replace(b'\0', b' ').decode()
        except (OSError, ValueError):
            pass
    return found


def about(pid, name):
    """Returns a file of /proc about a process."""
    with open('/proc/%d/%s' % (pid, name), encoding='utf-8') as file:
        return file.read()


def parent(pid):
    return int(re.search(r'^PPid:\s*(\d+)', about(pid, 'status'), re.M)[1])


def holds(condition):
    """Waits until a condition is true. Returns false at the deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# ---- the notebook ----

def check_cells():
    texts = cells_of(TRAINING) + cells_of(FAILURE) + cells_of(CRASH)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    resources = {'metadata': {'path': FOLDER}}
    nbclient.NotebookClient(notebook, timeout=DEADLINE, kernel_name=NAME,
                            resources=resources).execute()
    outputs = [''.join(output.get('text', '') for output in cell.outputs).replace('\r', '')
               for cell in notebook.cells if '%%writefile' not in cell.source]
    training, failure, crash = outputs

    ok(sorted(training.splitlines()) == sorted(shown_after('The output below')),
       'the training prints what the page says', training)
    losses = [float(loss) for loss in re.findall(r'loss (\S+)', training)]
    ok(len(losses) > 2 and losses == sorted(losses, reverse=True), 'the loss falls', training)
    weights = re.findall(r'rank \d: (.*)', training)
    ok(len(weights) == N_RANKS and len(set(weights)) == 1, 'the ranks have equal weights', training)

    promised = [line for line in shown_after(FAILURE)
                if KERNEL == 'c' or not line.startswith('[C kernel]')]
    ok(sorted(failure.splitlines()) == sorted(promised),
       'an error has the number of its rank; what was printed before is there', failure)
    ok('rank 1 loads its samples\n' in crash and
       'rank 1 was killed by signal 11 (Segmentation fault)' in crash and
       'signal 11 (Segmentation fault)' in TEXT, 'a crash has the number of its rank', crash)
    ok(holds(lambda: not processes()), 'no process is left', processes())


# ---- events ----

class Notebook:
    """A kernel, and the messages that a front end exchanges with the kernel."""

    def __init__(self):
        self.manager = KernelManager(kernel_name=NAME, shutdown_wait_time=2)
        self.manager.start_kernel(cwd=FOLDER)
        self.request = None # of the last cell
        self.pid = self.manager.provisioner.pid
        self.client = self.manager.client()
        clients.append(self.client)
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE)

    def run(self, code, until=None):
        """Runs a cell to its end, or until it has printed a text. Returns what it has printed."""
        self.request, printed = self.client.execute(code), ''
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end and not (until and until in printed):
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except Empty:
                continue
            if message['parent_header'].get('msg_id') != self.request:
                continue
            if message['content'].get('execution_state') == 'idle':
                return printed
            printed += message['content'].get('text', '')
        return printed if until and until in printed else 'hang: ' + printed

    def train(self):
        """Starts an endless training. Returns after its first line."""
        *before, last = cells_of(ENDLESS)
        for cell in before:
            self.run(cell)
        printed = self.run(last, until='epoch 0: loss')
        running = processes()
        ranks = [pid for pid, command in running.items() if running.get(parent(pid)) == command]
        ok(not printed.startswith('hang') and len(ranks) == N_RANKS, 'a training runs', printed,
           running)
        files = re.findall(r'/dev/shm/.*', ''.join(about(pid, 'maps') for pid in ranks))
        ok(not files, 'its ranks map no file in /dev/shm', *files)

    def replies(self):
        """Returns the cells, by request, to which the kernel has replied, up to the last cell."""
        replies = []
        while self.request not in replies:
            message = self.client.get_shell_msg(timeout=DEADLINE)
            replies.append(message['parent_header'].get('msg_id'))
        return replies

    def ended(self, name):
        """Checks that only the kernel is left, and that it runs the next cell."""
        kernel = self.manager.provisioner.pid
        ok(holds(lambda: list(processes()) == [kernel]), name + ': only the kernel is left',
           'hang', kernel, processes())
        printed = self.run(HELLO)
        ok(printed == 'hello\n', name + ': the kernel runs the next cell', printed)


def check_stop():
    notebook = Notebook()

    notebook.train()
    interrupted = notebook.request
    notebook.manager.interrupt_kernel()
    notebook.ended('interrupt')
    ok((interrupted in notebook.replies()) == (KERNEL != 'c'),
       'interrupt: as the page says, only the Python kernel replies to the cell')

    notebook.train()
    os.kill(notebook.pid, signal.SIGINT)
    if KERNEL == 'c':
        printed = notebook.run(HELLO)
        ok(printed == 'hello\n', 'SIGINT to the kernel: the kernel runs the next cell', printed)
        ok(len(processes()) == 2 + N_RANKS, 'SIGINT to the kernel: the ranks continue', processes())
    else:
        notebook.ended('SIGINT to the kernel')
        notebook.train()
    notebook.manager.restart_kernel()
    notebook.client.wait_for_ready(timeout=DEADLINE)
    notebook.ended('restart')

    notebook.train()
    notebook.manager.shutdown_kernel()
    ok(holds(lambda: not processes()), 'shutdown: no process is left', 'hang', processes())
    left = os.listdir(os.environ['TMPDIR'])
    ok(not left, 'shutdown: no temporary file is left', *left)


def check_kill():
    notebook = Notebook()

    notebook.train()
    os.kill(notebook.pid, signal.SIGKILL)
    ok(holds(lambda: not processes()), 'no process is left', 'hang', processes())
    left = [name for name in os.listdir(os.environ['TMPDIR'])
            if not re.fullmatch(r'tmp\w+\.(c|out|json)', name)] # the kernel's own
    ok(not left, 'no file but those of the kernel is left', *left)


def main():
    os.environ.update([MARK.split('=')])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('hang: terminated'))
    try:
        {'cells': check_cells, 'stop': check_stop, 'kill': check_kill}[PART]()
    finally:
        for client in clients:
            client.stop_channels()
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
    sys.exit(failed != 0)


main()
