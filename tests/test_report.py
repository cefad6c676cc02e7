"""The report: what it shows is what the run logged, in a file that needs nothing from outside."""

import html
import html.parser
import itertools
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import yaml

from dflash_ddp import report
from dflash_ddp.charts import HEIGHT, LEFT, MAX_POINTS, TOP, WIDTH, Series, chart, thinned, ticks
from dflash_ddp.plan import load_config
from dflash_ddp.report import FILE, read_run, write_or_warn, write_report
from dflash_ddp.settings import resolved

STEPS = 30


def make_run(folder, lr: float, *, more: str = ""):
    """A run's directory with a straight loss from 4 to 1, and an evaluation at both ends."""
    folder.mkdir()
    rows = [{"step": 0, "heldout/accept_length": 1.0, "heldout/slot_1": 0.1, "heldout/slot_2": 0.0}]
    for step in range(1, STEPS + 1):
        loss = 4 - 3 * (step - 1) / (STEPS - 1)
        rows.append({"step": step, "train/loss": loss, "wait/drafter_share": 0.25, "optim/lr": lr})
    rows.append({"step": STEPS, "heldout/accept_length": 2.5, "heldout/slot_1": 0.75})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + more)
    config = load_config(["experiment=demo", f"optim.lr={lr}", "name='<b>&co'"])
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved(config)))
    data = {"num_rows": 7, "num_tokens": 100, "num_supervised_tokens": 40, "lengths": [[64, 3]]}
    refused = {"unknown role 'x'": {"count": 2, "examples": ["text.jsonl:4: keys found: ['x']"]}}
    data |= {"dropped_rows": refused, "dropped_answers": {}}
    (folder / "data_report.json").write_text(json.dumps({"text": data}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "optim.lr=0.001", 1e-3), make_run(folder / "optim.lr=0.002", 2e-3)]


def page(folders, tmp_path) -> str:
    write_report(folders, tmp_path / FILE)
    return (tmp_path / FILE).read_text()


class Page(html.parser.HTMLParser):
    """Tags that are open, every address, and whether each end tag closes the tag that is open."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.addresses, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_outside(runs, tmp_path):
    text = page(runs, tmp_path)
    found = Page(text)
    assert found.open == []
    assert found.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert not re.search(r"https?:|url\(|@import|\$\w", text)
    assert "prefers-color-scheme: dark" in text
    assert "<b>&co" not in text
    assert "&lt;b&gt;&amp;co" in text


def svg(text: str, title: str) -> ET.Element:
    return ET.fromstring(re.search(rf'<svg [^>]*aria-label="{title}.*?</svg>', text)[0])


def test_a_curve_goes_through_the_logged_values(runs, tmp_path):
    """Read back by the chart's own axis labels: a straight loss from 4 at step 1 to 1 at step 30."""
    drawn = svg(page(runs[:1], tmp_path), "Loss")
    labels = [
        (float(t.get("y")) - 4, float(t.text))
        for t in drawn.iter("text")
        if float(t.get("x")) < LEFT
    ]
    (y_a, low), (y_b, high) = labels[0], labels[-1]
    points = [
        tuple(map(float, p.split(","))) for p in next(drawn.iter("polyline")).get("points").split()
    ]
    assert len(points) == STEPS
    values = [low + (y - y_a) * (high - low) / (y_b - y_a) for _, y in points]
    assert values[0] == pytest.approx(4, abs=0.03)
    assert values[-1] == pytest.approx(1, abs=0.03)
    assert values[14] == pytest.approx(4 - 3 * 14 / 29, abs=0.03)
    assert all(LEFT <= x <= WIDTH and TOP - 0.1 <= y <= HEIGHT for x, y in points)
    titles = [title.text for title in drawn.iter("title")]
    assert titles[0] == "train/loss, 1: 4"
    assert titles[-1] == "train/loss, 30: 1"


def test_first_losses_far_above_all_others_do_not_flatten_the_curve():
    points = [(step, 1000.0 if step == 0 else 3.0 + step % 2) for step in range(200)]
    drawn = svg(chart("Loss", "nats", [Series("s", points, 0)]), "Loss")
    highest = max(float(t.text) for t in drawn.iter("text") if float(t.get("x")) < LEFT)
    assert highest < 10


def test_several_runs_are_named_and_what_differs_comes_first(runs, tmp_path):
    text = page(runs, tmp_path)
    for run in runs:
        assert text.count(run.name) >= 4
    loss = svg(text, "Loss")
    assert [line.get("stroke") for line in loss.iter("polyline")] == ["var(--c0)", "var(--c1)"]
    settings = text[text.index("Every setting") :]
    assert settings.index("optim.lr") < settings.index("optim.beta1")
    assert '<tr class="differs"><td>optim.lr</td><td>0.001</td><td>0.002</td></tr>' in settings


def test_summary_slots_and_text_are_those_of_the_run(runs, tmp_path):
    text = page(runs[:1], tmp_path)
    assert "<td>best heldout/accept_length</td><td>2.5 at step 30</td>" in text
    assert "<td>heldout/accept_length (tokens)</td><td>2.5</td>" in text
    assert read_run(runs[0]).slots("heldout") == [(1, 0.75)], "slots of one evaluation, not of two"
    assert "dropped rows: unknown role &#x27;x&#x27;</td><td>2; first: text.jsonl:4" in text
    assert "<td>supervised share</td><td>0.4</td>" in text


def test_a_run_at_work_can_be_read(tmp_path):
    folder = make_run(tmp_path / "run", 1e-3, more='{"step": 31, "train/lo')
    assert read_run(folder).last("step") == STEPS
    (folder / "metrics.jsonl").write_text("")
    assert "<h2>Curves</h2>" in page([folder], tmp_path)


def test_long_curves_are_thinned_to_means_and_keep_their_end():
    points = [(float(step), float(step % 2)) for step in range(1, 10_001)]
    few = thinned(points)
    assert len(few) <= MAX_POINTS + 1
    assert few[-1] == points[-1]
    assert sum(y for _, y in few[:-1]) / (len(few) - 1) == pytest.approx(0.5, abs=0.02)
    assert [x for x, _ in few] == sorted({x for x, _ in few})


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1.0, 1.066), (0, 2593), (3, 3), (-2, 5), (0, 6e-4), (0, 0)]
)
def test_ticks_are_round_and_hold_the_values(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high - 1e-12
    assert 2 <= len(found) <= 7
    assert len({round(b - a, 9) for a, b in itertools.pairwise(found)}) == 1


def test_the_command_says_where_it_wrote_or_what_is_wrong(runs, tmp_path, monkeypatch, capsys):
    words = [f"run={runs[0]},{runs[1]}", f"out={tmp_path / 'x.html'}"]
    monkeypatch.setattr(sys, "argv", ["report", *words])
    report.main()
    assert capsys.readouterr().out == f"{tmp_path / 'x.html'}\n"
    for bad, expected in (
        ([f"run={tmp_path}"], "no metrics.jsonl"),
        (["runs=1"], "runs=1 is no setting; did you mean run?"),
        ([], "give run=<dir>"),
        (["run=a", "run=b,c"], "run is given 2 times: give it once; several values: run=a,b,c"),
    ):
        monkeypatch.setattr(sys, "argv", ["report", *bad])
        with pytest.raises(SystemExit, match="2"):
            report.main()
        assert expected in capsys.readouterr().err


def test_a_folder_with_commas_in_its_name_is_one_run(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "split=5t3d,optim.lr=0.001", 1e-3)
    monkeypatch.setattr(sys, "argv", ["report", f"run={folder}"])
    report.main()
    assert (folder / FILE).is_file()


def test_a_damaged_file_costs_a_run_no_more_than_its_report(tmp_path, caplog):
    folder = make_run(tmp_path / "run", 1e-3)
    (folder / "config.yaml").write_text("{{: [")
    write_or_warn(folder)
    assert "a file is damaged" in caplog.text


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
LOOK = """<script>
const box = (one) => one.getBoundingClientRect(), all = (what) => [...document.querySelectorAll(what)];
const words = (of, what) => [...of.querySelectorAll(what)];
const colour = getComputedStyle(document.body);
for (const one of all("details")) one.open = true;
const facts = {
  width: innerWidth,
  needed: document.documentElement.scrollWidth,
  ink: colour.color,
  page: colour.backgroundColor,
  charts: all("figure").length,
  outside: all("figure").flatMap((figure) => words(figure, "text, .legend span, small").filter((one) =>
    box(one).left < box(figure).left || box(one).right > box(figure).right ||
    box(one).bottom > box(figure).bottom).map((one) => one.textContent)),
  covered: all("figure").flatMap((figure) => words(figure, "text").filter((one) =>
    box(one).top < box(figure.querySelector(".legend")).bottom).map((one) => one.textContent)),
};
parent.document.body.innerHTML = "<pre>" + JSON.stringify(facts) + "</pre>";
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("number_of_runs", [1, 2])
def test_a_browser_shows_all_of_it(tmp_path, number_of_runs, scheme, width):
    """Nothing is wider than the window, no label leaves its chart or lies on its legend; in either colour scheme."""
    folders = []
    for number in range(number_of_runs):
        name = f"split=5t3d,optim.lr=0.000{number},drafter.num_anchors=2048,drafter.block_size=16"
        fast = f'{{"step": 30, "speed/tokens_per_s": 145000{number}, "memory/target_gib": 100.5}}\n'
        folders.append(make_run(tmp_path / name, (1 + number) * 1e-4, more=fast))
    inside = html.escape(page(folders, tmp_path).replace("</body>", LOOK))
    frame = f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{inside}"></iframe>'
    (tmp_path / FILE).write_text(frame)  # a window is 500 pixels wide at least
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1500,900"]
    command += ["--force-dark-mode"] if scheme == "dark" else []
    command += ["--dump-dom", (tmp_path / FILE).as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    facts = json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", shown.stdout)[1]))
    assert facts["width"] == width
    assert facts["needed"] <= width
    assert facts["charts"] == 7
    assert (facts["outside"], facts["covered"]) == ([], [])
    ink, behind = (sum(map(int, re.findall(r"\d+", facts[key])[:3])) for key in ("ink", "page"))
    assert (ink > behind) == (scheme == "dark")
    assert abs(ink - behind) > 500
