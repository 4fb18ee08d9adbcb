"""What a reader would meet on every page of a built site, in Chromium, at three widths and in both themes:

    python tests/site/audit_site.py _docs [--pages flash ladder] [--shots FOLDER]

Lists what is cut or too wide, unreadable text, figures without alt text, requests to other hosts, missing files,
errors of scripts, and pages that weigh too much; the exit code is 1 when there is anything. Needs
`pip install playwright`, and a Chromium: the system's, or the one of `playwright install chromium`."""
import argparse, gzip, posixpath, re, shutil, sys, threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

WIDTHS = {"wide": 1400, "laptop": 1280, "phone": 390}    # in pixels
THEMES = "light", "dark"
HEAVY = 1_500_000    # bytes of a page with all that it loads
MAY_BE_HEAVY = set()    # three pages at most
CONTRAST = 4.5    # of a text to its background, as WCAG 2 asks for

# --- a site and a browser ---

class Site(SimpleHTTPRequestHandler):
    "Serves a built site below the path that it is published at, and its 404 page for what isn't there"
    def __init__(self, *args, at="/", **kwargs): self.at = at; super().__init__(*args, **kwargs)
    def log_message(self, *args): pass
    def translate_path(self, path): return super().translate_path("/" + path.removeprefix(self.at))
    def send_error(self, code, *args, **kwargs):
        lost = Path(self.directory)/"404.html"
        if code != 404 or not lost.exists(): return super().send_error(code, *args, **kwargs)
        body = lost.read_bytes()
        self.send_response(404)
        for header in (("Content-Type", "text/html"), ("Content-Length", str(len(body)))): self.send_header(*header)
        self.end_headers(); self.wfile.write(body)

def published_at(folder):
    "The path below its host that a site is published at: that of its home page, in its own sitemap"
    pages = re.findall(r"<loc>(.+?)</loc>", (folder/"sitemap.xml").read_text(encoding="utf-8"))
    return urlsplit(min((o for o in pages if o.endswith("/index.html")), key=len)).path.removesuffix("index.html")

@contextmanager
def served(folder):
    "The address of a built site, while it is served here"
    handler = partial(Site, directory=str(folder), at=published_at(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try: yield f"http://127.0.0.1:{server.server_port}{handler.keywords['at']}"
        finally: server.shutdown()

@contextmanager
def chromium():
    "A headless Chromium: Playwright's, or the system's"
    from playwright.sync_api import Error, sync_playwright
    with sync_playwright() as p:
        try: browser = p.chromium.launch()
        except Error:
            names = "chromium", "chromium-browser", "google-chrome"
            system = next(filter(None, map(shutil.which, names)), None)
            if not system: raise
            browser = p.chromium.launch(executable_path=system)
        try: yield browser
        finally: browser.close()

def pages(folder):
    "The pages of a built site, as paths inside of it, without those that only lead on to a new address"
    def leads_on(f): return 'http-equiv="refresh"' in f.read_text(encoding="utf-8")[:2000]
    return sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*.html") if "site_libs" not in f.parts and not leads_on(f))

# --- one page ---

# Runs in the page: what is wrong with its layout, as a list of [what, where]
LAYOUT = Path(__file__).with_name("audit_layout.js").read_text(encoding="utf-8")

def other_hosts(url, host):
    "What to say of a request"
    asked = urlsplit(url)
    return {f"asks {asked.netloc}"} if asked.scheme.startswith("http") and asked.netloc != host else set()

def weight(response):
    "The bytes that a response takes on its way from a host that compresses text, as GitHub Pages does"
    body = response.body()
    kind = response.headers.get("content-type", "")
    return len(gzip.compress(body)) if re.search(r"text|javascript|json|svg|xml", kind) else len(body)

def audit_page(browser, base, path, shots=None):
    "A page's weight in bytes, and the set of what is wrong with it"
    wrong, weights, host = set(), {}, urlsplit(base).netloc
    for theme in THEMES:
        page = browser.new_page(color_scheme=theme, viewport=dict(width=WIDTHS["wide"], height=900))
        answers = []
        page.on("response", lambda r: answers.append(r))
        page.on("request", lambda q: wrong.update(other_hosts(q.url, host)))
        page.on("pageerror", lambda e: wrong.add(f"script error: {e}"))
        page.goto(base + path, wait_until="load")
        page.evaluate("document.fonts.ready")
        for name, width in WIDTHS.items():
            page.set_viewport_size(dict(width=width, height=900))
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))") # what watches sizes has run
            for what, where in page.evaluate(LAYOUT, dict(phone=name == "phone", least=CONTRAST)):
                wrong.add(f"{theme if 'contrast' in what else name}: {what}: {where}")
            if shots: page.screenshot(path=shots/f"{path.replace('/', '-').removesuffix('.html')}-{width}-{theme}.png")
        for r in answers:
            if r.status >= 400: wrong.add(f"not there: {r.url.removeprefix(base)}")
            elif urlsplit(r.url).netloc == host: weights[r.url] = weight(r)
        page.close()
    total = sum(weights.values())
    if total > HEAVY and path not in MAY_BE_HEAVY: wrong.add(f"weighs {total/1e6:.2f} MB")
    return total, wrong

def audit(browser, folder, only=(), shots=None):
    "Yields each page's path, weight and what is wrong with it"
    with served(folder) as base:
        for path in pages(folder):
            if only and not any(posixpath.splitext(path)[0].endswith(o) for o in only): continue
            yield path, *audit_page(browser, base, path, shots)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that `make docs` wrote")
    parser.add_argument("--pages", nargs="*", default=(), help="only pages whose address ends so, without .html")
    parser.add_argument("--shots", type=Path, help="a folder for screenshots")
    args = parser.parse_args()
    if args.shots: args.shots.mkdir(parents=True, exist_ok=True)
    bad, weights = 0, {}
    with chromium() as browser:
        for path, weights[path], wrong in audit(browser, args.site, args.pages, args.shots):
            if wrong: print(path, *sorted(wrong), sep="\n    ", flush=True)
            bad += len(wrong)
    print("\nheaviest:", *(f"{path} {n/1e6:.2f} MB" for path, n in sorted(weights.items(), key=lambda o: -o[1])[:8]), sep="\n    ")
    print(f"{len(weights)} pages, {bad} things wrong")
    sys.exit(bool(bad))

if __name__ == "__main__": main()
