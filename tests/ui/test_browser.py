"""The page in a real browser, which opens every view of real runs by mouse and keyboard and sees live changes.

One session for all, for a browser and the runs take seconds to start. PACELINE_PICTURES names a folder for pictures of the views.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import states, store
from tests.cli.conftest import Cli
from tests.engines.conftest import require_engine
from tests.helpers import make_job, make_run, wait_until
from tests.sweeps.helpers import hide_matplotlib
from tests.ui.conftest import HOSTILE, log_values

#: Path of a Firefox that runs these tests in place of Chromium.
FIREFOX = os.environ.get("PACELINE_FIREFOX", "")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)
#: A timeout that only guards against hanging.
PATIENCE_MS = 90_000
#: Read this variable on import, because a fixture removes it later.
_PICTURES = os.environ.get("PACELINE_PICTURES")

TRAIN = """
import math, os, sys, time
import paceline
run = paceline.Run.get_context()
rank, steps = int(os.environ.get("RANK", 0)), int(sys.argv[1])
print("\\x1b[1;36mtraining\\x1b[0m with rank", rank, flush=True)
for step in range(steps):
    run.log("train/loss", 2 * math.exp(-3 * step / steps) + 0.05 * math.sin(step * 1.7 + rank), step=step)
    if rank == 0:
        run.log("val/accuracy", 1 - 0.8 * math.exp(-4 * step / steps), step=step)
    if step % 50 == 0:
        print(f"step {step}  loss \\x1b[33mlow\\x1b[0m", flush=True)
if rank == 0:
    run.log_table("confusion", {"class": ["cat", "dog"], "cat": [48, 3], "dog": [2, 47]})
    open("outputs/scores.csv", "w").write("epoch,loss\\n0,0.9\\n1,0.5\\n")
    open("outputs/model.txt", "w").write("weights")
"""
HOSTILE_SCRIPT = f"""
import paceline
words = {HOSTILE!r}
run = paceline.Run.get_context()
run.log(words, 1.0)
run.log_row(words, **{{words: words}})
for name in ("x.svg", "page.html"):
    open("outputs/" + name, "w").write('<svg xmlns="http://www.w3.org/2000/svg"><script>document.title="owned"</script></svg>')
print(words)
raise ValueError(words)
"""
LIVE = """
import os, time
import paceline
run = paceline.Run.get_context()
run.log("loss", 5.0, step=0)
print("first line", flush=True)
here, step = os.environ["PACELINE_OUTPUT_DIR"], 0
while not os.path.exists(here + "/stop"):
    if os.path.exists(here + "/go"):
        os.unlink(here + "/go")
        step += 1
        run.log("loss", 5.0 - step, step=step)
        print(f"said {step}", flush=True)
    time.sleep(0.02)
"""
SWEEP = """
from pathlib import Path
import paceline as pl
workspace = pl.Workspace(Path(".paceline"))
estimator = pl.Estimator(source_directory="src", entry_script="tune.py")
space = {"--lr": pl.loguniform(1e-3, 1), "--kind": pl.choice("a", "b")}
run = pl.Experiment(workspace, "tuned").submit(pl.Sweep(estimator, space, metric="score", seed=1, trials=4, concurrent=2))
run.wait_for_completion()
print(run.id)
"""
TUNE = """
import sys, paceline
run = paceline.Run.get_context()
lr = float(sys.argv[sys.argv.index("--lr") + 1])
for step in range(3):
    run.log("score", lr + step, step=step)
"""


@pytest.fixture
def page(cli: Cli) -> Iterator[Any]:
    """A tab. In the end nothing may have gone wrong in any view: `page.problems`."""
    require_engine("chromium", FIREFOX or CHROMIUM)
    require_engine("playwright for Python", importlib.util.find_spec("playwright"))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        if FIREFOX:
            # Use WebDriver BiDi, because Playwright's own build of Firefox is not in package registries.
            browser = playwright.firefox.launch(channel="moz-firefox", executable_path=FIREFOX)
        else:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_OPTIONS)
        context = browser.new_context(viewport={"width": 1400, "height": 900}, accept_downloads=True)
        context.set_default_timeout(PATIENCE_MS)
        tab = context.new_page()
        tab.problems = []  # type: ignore[attr-defined]
        tab.on("pageerror", lambda error: tab.problems.append(str(error)))  # type: ignore[attr-defined]
        tab.on("console", lambda said: said.type in ("error", "warning") and tab.problems.append(said.text))  # type: ignore[attr-defined]
        tab.on("dialog", lambda dialog: (tab.problems.append(dialog.message), dialog.dismiss()))  # type: ignore[attr-defined]
        tab.on("request", lambda sent: "127.0.0.1" in sent.url or tab.problems.append(sent.url))  # type: ignore[attr-defined]
        yield tab
        browser.close()


class Session:
    """The server and the tab."""

    def __init__(self, cli: Cli, page: Any) -> None:
        self.cli, self.page = cli, page
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.url = self.start()

    def start(self) -> str:
        self.process = self.cli.start("ui", "--port", str(self.port), "--json")
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.port = said["port"]
        self.base = f"http://127.0.0.1:{self.port}"
        return str(said["url"])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=60)

    def open(self, path: str) -> None:
        self.page.goto(f"{self.base}{path}")
        self.page.wait_for_load_state("load")

    def drawn(self, name: str) -> Any:
        return self.page.evaluate("name => (window.pacelineDrawn || {})[name]", name)

    def wait_drawn(self, name: str, last: float) -> None:
        self.page.wait_for_function("([name, last]) => window.pacelineDrawn?.[name]?.last === last", arg=[name, last])

    def picture(self, name: str) -> None:
        if _PICTURES:
            self.page.screenshot(path=f"{_PICTURES}/{name}.png", full_page=True)


#: Rules of axe-core: all rules, and the rules whose result depends on colours.
_ALL = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
_OF_COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}


def findings(session: Session, where: str, rules: Any) -> list[str]:
    """What axe-core finds: contrast, names of controls, order of headings, and so on."""
    require_engine("axe-playwright-python", importlib.util.find_spec("axe_playwright_python"))
    from axe_playwright_python.base import AXE_FILE_PATH

    if not session.page.evaluate("'axe' in window"):
        session.page.evaluate(Path(AXE_FILE_PATH).read_text())
    found = session.page.evaluate("rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']})", rules)
    return [
        f"{where}: {one['id']}: {node['target']} {node['failureSummary'][:300]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


@pytest.mark.promise("real-browser-view-real-runs", "sweep-s-axes-chosen-mouse")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_page_shows_real_runs_in_a_browser_without_errors(cli: Cli, page: Any) -> None:
    good = cli(
        "submit", "-e", "digits", "--name", "baseline", "--tag", "lr=0.1", cli.script(TRAIN), "--", "300"
    ).stdout.strip()
    pair = cli("submit", "-e", "digits", "-j", "2", "--backend", "gloo", cli.script(TRAIN), "--", "200").stdout.strip()
    bad = cli(
        "submit", "-e", "words", "--name", HOSTILE, "--tag", f"{HOSTILE}=x", cli.script(HOSTILE_SCRIPT, "bad/x.py")
    ).stdout
    bad = bad.strip()
    cli.script(TUNE, "src/tune.py")
    hide_matplotlib(cli.folder / ".paceline")  # the page shows the curves without a PNG
    done = subprocess.run(
        [sys.executable, "-c", SWEEP], cwd=cli.folder, env=cli.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sweep = done.stdout.strip()
    assert [cli.wait(run) for run in (good, pair, bad)] == ["Completed", "Completed", "Failed"]
    cli("model", "register", "digits", "outputs/model.txt", "--run", good)
    live = cli("submit", "-e", "live", cli.script(LIVE, "live/x.py")).stdout.strip()
    cli.wait(live, "Running")
    outputs = cli.run_folder(live) / "outputs"
    session = Session(cli, page)
    try:
        # Without a token, the page asks for it and accepts it.
        page.goto(f"{session.base}/")
        page.fill("#token", session.url.partition("token=")[2])
        page.keyboard.press("Enter")
        page.wait_for_selector("#rows tr")
        assert "token" not in page.url
        page.problems.clear()  # the browser itself reports the 401
        _every_view(session, good=good, pair=pair, bad=bad, sweep=sweep)
        _keyboard(session, good)
        _sweep(page, f"{session.base}/runs/{sweep}/sweep", is_live=True)
        alone = page.context.new_page()
        _sweep(alone, (cli.run_folder(sweep) / "outputs" / "sweep.html").as_uri(), is_live=False)
        alone.close()
        _piece_behind_a_proxy(session)
        _live(session, live, outputs)
        _charts(session, pair)
        session.open(f"/runs/{live}")
        session.wait_drawn("loss", 3)
        _killed_and_started_again(session, outputs)
        _actions(session, good, live)
    finally:
        (outputs / "stop").touch()
        session.kill()
    assert page.problems == []
    assert cli.wait(live) in ("Completed", "Canceled")


def _every_view(session: Session, *, good: str, pair: str, bad: str, sweep: str) -> None:
    page = session.page
    views = {
        "runs": "/",
        "group": "/?group=experiment",
        "archived": "/?archived=1",
        "views": "/views",
        "trash": "/trash",
        "new": "/new",
        "again": f"/runs/{good}/rerun",
        "run": f"/runs/{good}",
        "ranks": f"/runs/{pair}",
        "failed": f"/runs/{bad}",
        "files": f"/runs/{good}/files",
        "folder": f"/runs/{good}/folder/outputs",
        "look": f"/runs/{good}/look/outputs/scores.csv",
        "details": f"/runs/{good}/details",
        "controller": f"/runs/{sweep}?tab=log",
        "sweep": f"/runs/{sweep}/sweep",
        "compare": f"/compare?run={good}&run={pair}",
        "models": "/models",
        "model": "/models/digits/1",
        "services": "/services",
        "compute": "/compute",
    }
    found: list[str] = []
    for name, path in views.items():
        session.open(path)
        if name in ("run", "ranks", "failed", "compare"):
            page.wait_for_selector(".chart canvas, .numbers dd")
            # An ended run still sends the first message of its stream, which has the log.
            if name != "compare":
                page.wait_for_selector("#log .line")
        if name == "runs":
            # A tag is one line high: no column is so narrow that words break.
            tag = page.locator(f"tr[data-run='{good}'] .tag").first
            assert tag.bounding_box()["height"] < 30
        if name == "controller":
            page.wait_for_selector("#log .line:has-text('the sweep is Completed')")
            assert "node 0" not in page.locator("#log").inner_text()
        if name == "compute":
            page.wait_for_selector(".target")
        if name == "compare":
            page.wait_for_selector("#changes .note, #changes table")
        # Open all forms and reports, so that axe-core checks them too. A dark page differs only in its colours.
        page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        for scheme, rules in (("light", _ALL), ("dark", _OF_COLOURS)):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(50)
            found += findings(session, f"{name}, {scheme}", rules)
            session.picture(f"{name}-{scheme}")
        page.set_viewport_size({"width": 390, "height": 800})
        # Nothing is wider than the screen of a phone.
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        session.picture(f"{name}-phone")
        page.set_viewport_size({"width": 1400, "height": 900})
        assert page.title() != "owned"
    assert not found, "\n".join(found)
    # An HTML file, and an SVG with a script, are downloaded and not opened.
    for file in ("x.svg", "page.html"):
        session.open(f"/runs/{bad}/files")
        with page.expect_download() as kept:
            page.evaluate(f"location.href = 'file/outputs/{file}'")
        assert kept.value.suggested_filename == file
    session.open(f"/runs/{bad}/look/outputs/x.svg")
    page.wait_for_function("() => document.querySelector('img.whole').complete")
    assert page.title() != "owned"
    # A name with markup is shown as text.
    session.open("/?q=words")
    assert "<script>" in page.locator("#rows tr").first.text_content()


def _keyboard(session: Session, good: str) -> None:
    page = session.page
    page.emulate_media(color_scheme="light")
    session.open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    page.keyboard.type("baseline")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?q=baseline")
    page.wait_for_function("() => document.querySelectorAll('#rows tr').length === 1")
    page.locator("#rows a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".chart canvas")
    chart = page.locator(".chart").first
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.legendline').textContent.includes('step 1')")
    # A zoom is exact, is in the address, and is restored when the address is opened.
    before = len(page.evaluate("document.querySelector('.chart').chart.plot.data[0]"))
    page.keyboard.press("+")
    page.wait_for_url("**from=**")
    page.wait_for_function(f"() => document.querySelector('.chart').chart.plot.data[0].length < {before}")
    page.reload()
    page.wait_for_selector(".chart canvas")
    page.wait_for_selector("#chart-reset:visible")
    page.locator(".chart").first.focus()
    page.keyboard.press("Escape")
    page.wait_for_function(f"() => document.querySelector('.chart').chart.plot.data[0].length === {before}")
    page.wait_for_function("() => !location.href.includes('from=')")
    # The mouse can zoom too.
    box = page.locator(".chart .u-over").first.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=**")
    page.click("#chart-reset")
    page.fill("#log-search", "step 100")
    page.wait_for_selector("#log mark")
    assert page.locator("#log .line").count() == 1


def _sweep(page: Any, address: str, *, is_live: bool) -> None:
    """The pictures on the page, and those in the file that was drawn at the sweep's end."""
    page.goto(address)
    brush = page.locator(".brush[role=slider]").first
    rows = page.locator("tr.trial:visible")
    assert rows.count() == 4
    # With the keyboard, the lower end moves above the two smaller learning rates, and back.
    brush.focus()
    for _ in range(11):
        page.keyboard.press("ArrowUp")
    assert rows.count() == 2
    assert brush.get_attribute("aria-valuetext") == "55 to 100 % of the axis, 2 of 4 trials"
    page.keyboard.press("Shift+PageDown")
    assert rows.count() == 1
    page.keyboard.press("Escape")
    assert rows.count() == 4
    # With the mouse, a drag selects the lower third, and a click shows all trials again.
    box = brush.bounding_box()
    x, bottom = box["x"] + box["width"] / 2, box["y"] + box["height"]
    page.mouse.move(x, bottom - 1)
    page.mouse.down()
    page.mouse.move(x, bottom - box["height"] / 3, steps=3)
    page.mouse.up()
    assert rows.count() == 2
    page.mouse.click(x, bottom - 20)
    assert rows.count() == 4
    # A trial is highlighted at each place that shows it.
    rows.first.hover()
    # The five places are the table, the history, the parallel coordinates, and the slices of two hyperparameters.
    assert page.locator(".on").count() == 5
    sort = page.locator("#trials th, table.trials th", has_text="lr").first
    sort.locator("button").click()
    assert sort.get_attribute("aria-sort") == "ascending"
    values = [float(row.split("\t")[7 if is_live else 2]) for row in rows.all_inner_texts()]
    assert values == sorted(values)


def _live(session: Session, live: str, outputs: Path) -> None:
    page = session.page
    session.open("/")
    # state="attached", because a row that is not laid out yet has no visible text.
    page.wait_for_selector(f"tr[data-run='{live}']:has-text('Running')", state="attached")
    session.open(f"/runs/{live}")
    session.wait_drawn("loss", 5)
    page.wait_for_selector("#log .line:has-text('first line')")
    (outputs / "go").touch()
    session.wait_drawn("loss", 4)
    page.wait_for_selector("#log .line:has-text('said 1')")
    # A search also finds lines that arrive later.
    page.fill("#log-search", "said")
    page.wait_for_selector("#log-note:has-text('1 line found')")
    (outputs / "go").touch()
    page.wait_for_selector("#log-note:has-text('2 lines found')")
    page.fill("#log-search", "")
    page.wait_for_selector("#log .line:has-text('first line')")
    # The chart shows the total memory next to the used memory. The charts of nodes and workers are folded at first.
    for section in ("Nodes", "Workers"):
        page.locator("#system-charts summary", has_text=section).click()
    for title in ("memory GiB", "rank memory GiB"):
        page.locator("#system-charts h3 span").get_by_text(title, exact=True).wait_for()
    titles = page.locator("#system-charts h3 span:first-child").all_inner_texts()
    assert not [title for title in titles if "total" in title or "mib" in title]
    assert " of " in page.locator("#system-charts .chart .last").filter(has_text=" of ").first.inner_text()


def _charts(session: Session, pair: str) -> None:
    """Sections, pins, own charts, the menu of a chart and its files, by keys."""
    page = session.page
    session.open(f"/runs/{pair}")
    page.wait_for_selector(".chart canvas")
    assert page.locator("#charts summary").all_inner_texts() == ["train 1", "val 1"]
    page.locator("#charts summary").first.click()
    page.reload()
    page.wait_for_selector(".chart canvas")
    assert page.locator("details.metrics").first.get_attribute("open") is None
    page.locator("#charts summary").first.click()
    page.wait_for_function("() => window.pacelineDrawn?.['train/loss']")
    menu = page.get_by_role("button", name="train/loss: menu")
    kept: dict[str, str] = {}
    for kind in ("PNG", "SVG", "CSV"):
        menu.press("Enter")
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=f"Save as {kind}").press("Enter")
        kept[download.value.suggested_filename] = Path(download.value.path()).read_bytes().decode("latin-1")
    assert list(kept) == ["train_loss.png", "train_loss.svg", "train_loss.csv"]
    png, svg, csv = kept.values()
    assert png.startswith("\x89PNG")
    assert svg.startswith("<svg xmlns")
    assert "train/loss</text>" in svg
    # 200 values of each of two ranks, and a line of headings.
    assert len(csv.splitlines()) == 401
    menu.press("Enter")
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.activeElement.className === 'menubutton'")
    menu.press("Enter")
    page.get_by_role("menuitem", name="Full screen").press("Enter")
    page.wait_for_selector("dialog[open] .chart canvas")
    assert not (found := findings(session, "full screen", _ALL)), found
    # A pin changes the order of the charts. The chart in full screen stays the same.
    menu.press("Enter")
    page.get_by_role("menuitem", name="Pin to the top").press("Enter")
    page.wait_for_selector("#pinned", state="attached")
    assert page.locator("dialog[open] .chart canvas").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.wait_for_selector("#pinned .chart")
    for kind, first, second in (
        ("scatter", "train/loss", "val/accuracy"),
        ("bar", "train/loss", ""),
        ("histogram", "train/loss", ""),
    ):
        page.click("#own-add")
        page.get_by_label("Kind").select_option(kind)
        page.locator("dialog input").first.fill("no such metric")
        if second:
            page.get_by_label("Horizontal axis").fill(second)
        page.get_by_role("button", name="Add", exact=True).click()
        page.locator("dialog [role=alert]:has-text('No metric of this run')").wait_for()
        assert not (found := findings(session, "add a chart", _ALL)), found
        page.locator("dialog input").first.fill(first)
        page.get_by_role("button", name="Add", exact=True).click()
        page.wait_for_selector("dialog", state="detached")
    titles = ["train/loss", "train/loss over val/accuracy", "Last values: train/loss", "Histogram: train/loss"]
    page.wait_for_function("() => document.querySelectorAll('#pinned canvas').length === 4")
    assert page.locator("#pinned h3 span:first-child").all_inner_texts() == titles
    page.get_by_role("button", name="Histogram: train/loss: menu").press("Enter")
    page.get_by_role("menuitem", name="Move forward").press("Enter")
    page.reload()
    page.wait_for_function("() => document.querySelectorAll('#pinned canvas').length === 4")
    assert page.locator("#pinned h3 span:first-child").all_inner_texts() == [*titles[:2], titles[3], titles[2]]
    assert not (found := findings(session, "own charts", _ALL)), found
    session.picture("own-charts")
    page.evaluate("() => { for (const key of Object.keys(localStorage)) localStorage.removeItem(key); }")
    # In every exported file, the name of a metric is text and not a formula.
    texts = ["=1+2", "-x", "@a", "+b", 'a,"b', -1]
    menu_of = "import(document.body.dataset.static + 'chart_menu.js')"
    cells = page.evaluate(f"texts => {menu_of}.then(menu => texts.map(menu.cell))", texts)
    assert cells == ["'=1+2", "'-x", "'@a", "'+b", '"a,""b"', "-1"]


def _piece_behind_a_proxy(session: Session) -> None:
    """Links in live updates lead to the same places as those of the page, below any path."""
    page, below = session.page, "/user/me/proxy/7223"
    page.route(f"**{below}/**", lambda route: route.continue_(url=route.request.url.replace(below, "")))
    session.open(f"{below}/models")
    session.cli("model", "alias", "digits", "champion", "1")
    page.wait_for_selector(".alias:has-text('champion')")
    for link in page.locator("[data-piece] a").all():
        assert link.evaluate("a => a.href").startswith(f"{session.base}{below}/")
    page.unroute(f"**{below}/**")


def _killed_and_started_again(session: Session, outputs: Path) -> None:
    page = session.page
    session.kill()
    page.wait_for_selector("#connection:visible")
    (outputs / "go").touch()
    wait_until(lambda: not (outputs / "go").exists(), "the run has seen it")
    session.start()
    session.wait_drawn("loss", 2)
    page.wait_for_selector("#log .line:has-text('said 3')")
    page.wait_for_selector("#connection", state="hidden")
    lines = page.locator("#log .line").all_inner_texts()
    assert [line for line in lines if line.startswith(("first", "said"))] == [
        "first line",
        "said 1",
        "said 2",
        "said 3",
    ]
    # The browser reports the missing server, which is not a fault of the page.
    session.page.problems[:] = [text for text in page.problems if "ERR_" not in text]


def _actions(session: Session, good: str, live: str) -> None:
    page = session.page
    session.open(f"/runs/{good}")
    page.click("summary:has-text('Add a tag')")
    page.fill("input[name=key]", "seen")
    page.fill("input[name=value]", "yes")
    page.click("button:text-is('Add')")
    page.wait_for_selector(".tag:has-text('seen')")
    assert session.cli.json("status", good)["tags"]["seen"] == "yes"
    page.click("a:has-text('Run again')")
    page.click("button:has-text('Start the run')")
    page.wait_for_function(f"() => location.pathname.startsWith('/runs/') && !location.pathname.includes('{good}')")
    again = page.url.rpartition("/")[2]
    assert session.cli.json("status", again)["tags"] == {"rerun_of": good}
    assert session.cli.wait(again) == "Completed"
    session.open(f"/runs/{live}")
    page.evaluate("window.confirm = () => true")
    page.click("button:has-text('Cancel')")
    # The page updates the state live until the run has ended.
    page.wait_for_selector("#head[data-status='Canceled']")
    session.open("/")
    # On a busy machine, the list first shows the earlier state.
    page.wait_for_selector(f"tr[data-run='{live}']:has-text('Canceled')", state="attached")


@pytest.mark.slow
def test_run_list_in_a_browser_searches_while_the_user_types_and_completes_field_names(cli: Cli, page: Any) -> None:
    session = Session(cli, page)
    runs_dir = cli.folder / ".paceline" / "runs"
    for number, acc in enumerate((0.5, 0.9), 1):
        folder, fd = make_run(
            runs_dir, f"digits_170000000{number}_00000001", job=make_job(arguments=("--lr", str(acc)))
        )
        store.change(folder, store.stored(folder), states.COMPLETED)
        os.close(fd)
        log_values(folder, "acc", [acc, acc / 2])
    page.goto(session.url)
    page.wait_for_selector("#rows tr:nth-child(2)")
    page.locator("#q").fill("state=completed metrics.ac")
    page.wait_for_selector("#suggestions li")
    assert page.locator("#suggestions li").first.inner_text().split() == [
        "metrics.acc",
        "a",
        "metric's",
        "last",
        "value",
    ]
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#q", "aria-activedescendant") == "suggestion-0"
    assert findings(session, "completion", _ALL) == []
    page.keyboard.press("Enter")
    page.keyboard.type(".best >")
    page.wait_for_selector("#wrong:has-text('lacks a value')")
    assert page.locator("#rows tr").count() == 2
    page.keyboard.type(" 0.7")
    page.wait_for_selector("#rows tr:nth-child(2)", state="detached")
    assert page.input_value("#q") == "state=completed metrics.acc.best > 0.7"
    assert "metrics.acc.best" in page.url
    # The stream of the page follows the new query.
    folder, fd = make_run(runs_dir, "digits_1700000003_00000001")
    log_values(folder, "acc", [0.8])
    store.change(folder, store.stored(folder), states.COMPLETED)
    os.close(fd)
    page.wait_for_selector("#rows tr[data-run=digits_1700000003_00000001]")
    page.click("#columns summary")
    page.fill("#column", "params.lr")
    page.keyboard.press("Enter")
    page.wait_for_selector("th.c-more")
    assert page.locator("td.c-more").all_inner_texts() == ["", "0.9"]
    assert page.problems == []
    session.kill()


@pytest.mark.slow
def test_runs_are_deleted_restored_annotated_with_notes_and_started_in_a_browser(cli: Cli, page: Any) -> None:
    cli.script(TRAIN)
    first = cli("submit", "-e", "digits", cli.script(TRAIN), "--", "20").stdout.strip()
    second = cli("submit", "-e", "digits", cli.script(OPTIONS, "src/options.py"), "--", "--epochs", "3").stdout.strip()
    assert [cli.wait(run) for run in (first, second)] == ["Completed", "Completed"]
    session = Session(cli, page)
    try:
        page.goto(session.url)
        _bulk(session, first, second)
        _deleted_meanwhile(session, first)
        _noted(session, first)
        _started(session, second)
    finally:
        session.kill()
    assert page.problems == []


def _bulk(session: Session, first: str, second: str) -> None:
    """Tick runs, delete them, and undo that by keyboard alone."""
    page = session.page
    page.wait_for_selector(f"tr[data-run='{first}']")
    assert page.locator("#bulk").is_hidden()
    for run in (first, second):
        page.check(f"tr[data-run='{run}'] input")
    assert page.locator("#bulk-count").inner_text() == "2 ticked"
    session.picture("bulk")
    assert findings(session, "bulk", _ALL) == []
    page.focus("#bulk button[value=delete]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#bulk-said:has-text('2 runs are in the trash for 7 days.')")
    page.wait_for_selector(f"tr[data-run='{first}']", state="detached")
    assert session.cli.run_ids() == []
    session.picture("bulk-undo")
    assert findings(session, "undo", _ALL) == []
    # The message has the focus, and Undo comes next.
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Undo"
    page.keyboard.press("Enter")
    page.wait_for_selector("#bulk-said:has-text('2 runs are restored.')")
    page.wait_for_selector(f"tr[data-run='{first}']")
    page.keyboard.press("Escape")
    assert page.locator("#bulk-said").is_hidden()
    page.check(f"tr[data-run='{first}'] input")
    page.fill("#bulk input[name=key]", "best")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"tr[data-run='{first}'] .tag:has-text('best')")


def _deleted_meanwhile(session: Session, first: str) -> None:
    page = session.page
    session.open(f"/runs/{first}")
    session.cli("rm", "--yes", first)
    page.wait_for_selector("[role=alert]:has-text('This run was deleted.')")
    session.picture("gone")
    assert findings(session, "gone", _ALL) == []
    page.click("button:has-text('Undo: restore the run')")
    page.wait_for_selector("#head[data-status='Completed']")
    assert page.locator("[role=alert]").count() == 0
    assert first in session.cli.run_ids()


def _noted(session: Session, first: str) -> None:
    page = session.page
    page.click("summary:has-text('Add notes')")
    page.fill("form[action$='/notes'] textarea", f"**Best** so far {HOSTILE}\n\n- see [docs](https://example.org)")
    page.click("button:has-text('Save notes')")
    page.wait_for_selector(".notes strong:has-text('Best')")
    assert page.get_attribute(".notes a", "rel") == "noreferrer noopener nofollow"
    assert "owned" not in page.title()
    page.click("summary:has-text('Comment')")
    page.fill("form[action$='/comment'] textarea", f"Too fast? {HOSTILE}\nYes.")
    page.click("button:has-text('Add comment')")
    page.wait_for_selector(".comment p:has-text('Too fast?')")
    assert "owned" not in page.title()
    session.picture("notes")
    assert findings(session, "notes", _ALL) == []
    page.click("[aria-label^='Remove the comment of']")
    page.wait_for_selector(".comment", state="detached")


def _started(session: Session, second: str) -> None:
    page = session.page
    session.open(f"/runs/{second}")
    page.click("a:has-text('Run again')")
    page.fill("[name='option:--epochs']", "many")
    page.click("button:has-text('Start the run')")
    page.wait_for_selector(".fielderror:has-text('many must be of type int')")
    session.picture("again")
    assert findings(session, "again", _ALL) == []
    page.fill("[name='option:--epochs']", "4")
    page.select_option("[name='option:--opt']", "adam")
    page.click("button:has-text('Start the run')")
    page.wait_for_selector("#head")
    again = page.url.rpartition("/")[2]
    assert session.cli.wait(again) == "Completed"
    assert "4 adam" in session.cli("logs", again).stdout
    session.open("/new")
    page.set_input_files(
        "input[type=file]", {"name": "j.yaml", "mimeType": "text/yaml", "buffer": b"entry_script: none.py"}
    )
    page.wait_for_function("() => document.getElementById('job-text').value === 'entry_script: none.py'")
    page.click("button:has-text('Start the run')")
    page.wait_for_selector("[role=alert]:has-text('none.py')")
    session.picture("new")
    assert findings(session, "new", _ALL) == []
    # The browser itself reports the status of refused forms, and of requests for deleted runs.
    page.problems[:] = [
        text for text in page.problems if " 422 " not in text and " 410 " not in text and " 404 " not in text
    ]


OPTIONS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--opt", choices=["sgd", "adam"], default="sgd")
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
print(args.epochs, args.opt)
"""
