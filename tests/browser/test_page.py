"""The server's page in Chromium, with real clicks: asking, teaching, removing, the queue; wide, narrow and dark."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

httpx = pytest.importorskip("httpx")
sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")
expect = sync_api.expect

LEARNING = 60_000
"""Milliseconds that a teaching may take."""
REFUNDS = {
    "late": [
        "My money has not come back after three weeks",
        "You promised the refund on Monday, it is Friday",
        "Still waiting for the refund of order 4418",
        "A month has passed and no refund arrived",
        "The refund is overdue, when will I see it?",
        "I was told five days, that was two weeks ago",
    ],
    "how_to": [
        "How do I ask for my money back?",
        "Where is the form for refunds?",
        "Can I get a refund without the receipt?",
        "What must I do to return these shoes?",
        "Which steps are needed to send it back?",
        "Do I print a label myself to return it?",
    ],
    "wrong_amount": [
        "You paid back 20 instead of 35",
        "The refund is ten euros short",
        "Only half of what I paid came back",
        'They said "everything", yet postage is missing',
        "The sum you returned is too small",
        "I got less back than the invoice says",
    ],
}


class Watched:
    """A page whose requests and complaints are recorded."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        """Opens an empty tab; `open` goes to the server."""
        self.address = address
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda said: self.complaints.append(said.text) if said.type == "error" else None,
        )

    def open(self) -> Any:
        self.page.goto(self.address)
        return self.page


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Callable[..., Watched]]:
    """Opens tabs, and looks afterwards whether they asked others or complained."""
    visits: list[Watched] = []

    def begin(**options: Any) -> Watched:
        visits.append(Watched(browser, address, **options))
        return visits[-1]

    yield begin
    for one in visits:
        one.context.close()
        strangers = [url for url in one.requests if not url.startswith(f"{address}/")]
        assert one.requests
        assert not strangers
        assert not one.complaints


@pytest.fixture
def page(visit: Callable[..., Watched]) -> Any:
    return visit().open()


@pytest.fixture
def tasks(address: str) -> list[dict[str, Any]]:
    return httpx.get(f"{address}/v1/tasks").json()["tasks"]


@pytest.fixture
def table(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a table of refunds under a name."""

    def write(name: str) -> Path:
        lines = ["text,label"]
        for texts in zip(*REFUNDS.values(), strict=True):
            for label, text in zip(REFUNDS, texts, strict=True):
                quoted = text.replace('"', '""')
                lines.append(f'"{quoted}",{label}')
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def tick(page: Any, *names: str, find: bool = False) -> None:
    boxes = page.get_by_role("group", name="Which task?").get_by_role("checkbox")
    boxes.first.wait_for()
    for box in boxes.all():
        name = box.evaluate("box => box.labels[0].textContent.trim()")
        box.set_checked(name in names or (find and name == "Find the task for me"))


def ask(page: Any, *lines: str) -> Any:
    page.get_by_label("Texts, one per line").fill("\n".join(lines))
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator(".answer").first.wait_for()
    return page.locator(".answer")


def choose(page: Any, path: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a file").click()
    chooser.value.set_files(path)


def drop(page: Any, path: Path) -> None:
    """Drops a file as the window system does, not with an event made up in the page."""
    zone = page.locator("#drop")
    zone.scroll_into_view_if_needed()
    box = zone.bounding_box()
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] - 8}
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **at, "data": data})


def teach(page: Any) -> None:
    page.get_by_role("button", name="Teach", exact=True).click()


def one_task(page: Any, name: str) -> Any:
    heading = page.get_by_role("heading", name=name, exact=True)
    return page.locator("#tasks-list > li").filter(has=heading)


def percents(locator: Any) -> list[float]:
    return [float(text.removesuffix(" %")) for text in locator.all_inner_texts()]


def test_tasks_are_listed_with_labels_and_scores(page: Any, tasks: list[dict[str, Any]]) -> None:
    assert tasks
    for task in tasks:
        card = one_task(page, task["name"])
        expect(card).to_contain_text(task["labels"][0])
        score = task["validation_score"]
        expect(card).to_contain_text("–" if score is None else f"{100 * score:.1f} %")
    expect(page.locator("#about")).to_contain_text(f"{len(tasks)} tasks taught")


def test_many_labels_fold(page: Any, tasks: list[dict[str, Any]]) -> None:
    task = next((task for task in tasks if len(task["labels"]) > 8), None)
    if task is None:
        pytest.skip("no task with many labels")
    last = one_task(page, task["name"]).get_by_text(task["labels"][-1], exact=True)
    expect(last).to_be_hidden()
    page.get_by_role("button", name=f"more labels of {task['name']}").click()
    expect(last).to_be_visible()


def test_a_text_on_one_task(page: Any, tasks: list[dict[str, Any]]) -> None:
    task = next(task for task in tasks if not task["is_pair"])
    tick(page, task["name"])
    answers = ask(page, "Where is my parcel? It should have come on Monday")
    expect(answers).to_have_count(1)
    answer = page.get_by_role("article", name=f"Answer of {task['name']}")
    label = answer.locator(".label").inner_text()
    assert label in task["labels"]
    values = percents(answer.locator(".value"))
    assert values == sorted(values, reverse=True)
    if len(task["labels"]) <= 6:
        assert sum(values) == pytest.approx(100, abs=0.5)
    expect(page.locator("#try-status")).to_contain_text(f"{task['name']}: {label}")
    page.get_by_text("The same with curl").click()
    command = page.locator("#answers pre").inner_text()
    assert json.loads(command.split("-d '")[1].removesuffix("'"))["task"] == task["name"]


def test_two_texts_on_several_tasks(page: Any, tasks: list[dict[str, Any]]) -> None:
    names = [task["name"] for task in tasks if not task["is_pair"]][:3]
    tick(page, *names)
    with page.expect_request("**/v1/classify") as sent:
        answers = ask(page, "Please help me today", "", "The box was empty, it isn't funny")
    assert sent.value.post_data_json["task"] == names * 2
    expect(answers).to_have_count(2 * len(names))
    groups = page.locator(".answer-group")
    expect(groups.nth(1)).to_contain_text("The box was empty, it isn't funny")
    for name in names:
        expect(groups.nth(0).get_by_role("article", name=f"Answer of {name}")).to_be_visible()


def test_a_text_without_a_task(page: Any) -> None:
    tick(page, find=True)
    with page.expect_response("**/v1/classify") as heard:
        ask(page, "Where is my parcel? I want to track the package", "Zebras graze at dawn")
    found = heard.value.json()["answers"]
    for group, answer in zip(page.locator(".answer-group").all(), found, strict=True):
        expect(group.locator(".label")).to_have_text(answer["label"])
        expect(group).to_contain_text(answer["task"] or "Unlike every task taught")
        expect(group).to_contain_text(f"{answer['similarity']:.2f}")


def test_pairs_get_a_second_field(page: Any, tasks: list[dict[str, Any]]) -> None:
    task = next((task for task in tasks if task["is_pair"]), None)
    if task is None:
        pytest.skip("no task of pairs")
    tick(page, task["name"])
    second = page.get_by_label("Second text of each pair, one per line")
    page.get_by_label("Texts, one per line").fill("The shop is shut")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#try-problem")).to_contain_text("line 1 has no second one")
    second.fill("You cannot buy bread there now")
    with page.expect_request("**/v1/classify") as sent:
        ask(page, "The shop is shut")
    assert sent.value.post_data_json["inputs"] == [
        ["The shop is shut", "You cannot buy bread there now"]
    ]
    expect(page.locator("#try-problem")).to_be_empty()


def test_asking_nothing_says_so(page: Any) -> None:
    tick(page)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#try-problem")).to_have_text("Write a text first, one per line.")
    page.get_by_label("Texts, one per line").fill("Hello")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#try-problem")).to_contain_text("Tick a task")


def test_the_keyboard_is_enough_to_ask(page: Any, tasks: list[dict[str, Any]]) -> None:
    task = next(task for task in tasks if not task["is_pair"])
    tick(page)
    focused = "document.activeElement"

    def tab_to(wanted: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate(f"{focused}.matches({wanted!r})"):
                outline = page.evaluate(f"getComputedStyle({focused}).outlineWidth")
                assert outline == "3px"
                return
        raise AssertionError(f"Tab never reached {wanted}")

    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    tab_to("#texts")
    page.keyboard.type("Please, where is my parcel?")
    tab_to(f"#task-{tasks.index(task)}")
    page.keyboard.press("Space")
    tab_to("#ask")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name=f"Answer of {task['name']}")).to_be_visible()


def test_teach_by_choosing_a_file_and_remove(page: Any, table: Callable[[str], Path]) -> None:
    choose(page, table("refunds-chosen"))
    preview = page.get_by_role("group", name="Preview of refunds-chosen.csv")
    expect(preview.locator("tbody tr")).to_have_count(5)
    expect(preview).to_contain_text("18 rows, 3 labels")
    expect(preview.get_by_role("list", name="Rows per label")).to_contain_text("wrong_amount: 6")
    expect(page.get_by_label("Name of the task")).to_have_value("refunds-chosen")
    teach(page)
    card = page.locator(".teaching").filter(has_text="refunds-chosen")
    expect(card.get_by_role("progressbar", name="Progress of refunds-chosen")).to_be_visible()
    expect(card).to_contain_text("learning", timeout=LEARNING)
    expect(card.get_by_role("img", name=re.compile("Validation score"))).to_be_visible(
        timeout=LEARNING
    )
    expect(card).to_contain_text("refunds-chosen is taught", timeout=LEARNING)
    assert page.locator(".curve-dot").count() >= 2
    expect(page.locator("#teach-status")).to_contain_text("refunds-chosen is taught")
    expect(one_task(page, "refunds-chosen")).to_contain_text("wrong_amount")
    expect(page.locator("#queue-charts")).to_contain_text("refunds-chosen")

    tick(page, "refunds-chosen")
    ask(page, "You paid back 20 instead of 35, the refund is short")
    expect(page.locator(".answer .label")).to_have_text("wrong_amount")

    page.get_by_role("button", name="Remove refunds-chosen").click()
    dialog = page.get_by_role("dialog", name="Remove refunds-chosen?")
    expect(dialog).to_contain_text("What the queue and the shared prefix learnt from it stays")
    dialog.get_by_role("button", name="Keep it").click()
    expect(dialog).to_be_hidden()
    expect(one_task(page, "refunds-chosen")).to_be_visible()
    page.get_by_role("button", name="Remove refunds-chosen").click()
    dialog.get_by_role("button", name="Remove it").click()
    expect(one_task(page, "refunds-chosen")).to_have_count(0)
    expect(page.locator("#tasks-status")).to_contain_text("refunds-chosen is removed")
    expect(page.get_by_role("checkbox", name="refunds-chosen")).to_have_count(0)


def test_teach_by_dropping_a_file(page: Any, table: Callable[[str], Path]) -> None:
    page.locator(".task").first.wait_for()
    drop(page, table("refunds dropped"))
    expect(page.get_by_role("group", name="Preview of refunds dropped.csv")).to_be_visible()
    expect(page.get_by_label("Name of the task")).to_have_value("refunds-dropped")
    teach(page)
    expect(page.locator(".teaching")).to_contain_text("refunds-dropped is taught", timeout=LEARNING)
    expect(one_task(page, "refunds-dropped")).to_be_visible()

    choose(page, table("refunds-dropped"))  # the name is taken now
    teach(page)
    expect(page.locator("#teach-problem")).to_contain_text(
        "There is a task refunds-dropped already"
    )
    page.get_by_role("checkbox", name="Teach it anew").check()
    teach(page)
    expect(one_task(page, "refunds-dropped")).to_have_text(
        re.compile(r"version\s*2"), timeout=LEARNING
    )


def test_stop_and_go_on(page: Any, table: Callable[[str], Path]) -> None:
    choose(page, table("refunds-stopped"))
    teach(page)
    stop = page.get_by_role("button", name="Stop teaching refunds-stopped")
    card = page.locator(".teaching").filter(has_text="refunds-stopped")
    expect(card.locator(".curve-dot").nth(1)).to_be_visible(timeout=LEARNING)
    stop.focus()
    page.keyboard.press("Enter")
    resume = page.get_by_role("button", name="Go on teaching refunds-stopped")
    expect(resume).to_be_visible(timeout=LEARNING)
    expect(resume).to_be_focused()
    expect(stop).to_be_hidden()
    expect(card).to_contain_text("What it has learnt so far is kept")
    expect(one_task(page, "refunds-stopped")).to_have_count(0)
    page.reload()  # it is still there to go on with
    resume.click()
    expect(card).to_contain_text("refunds-stopped is taught", timeout=LEARNING)
    expect(one_task(page, "refunds-stopped")).to_be_visible()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("words.csv", b"sentence,class\nhello,a\n", "no column “text”"),
        ("words.csv", b"text,label\nhello,a\nbye,a\n", "one label only"),
        ("words.csv", b"text,label\n", "no rows"),
        ("words.csv", b"text,label\nhello, you,a\n", "more fields than columns"),
        ("words.csv", b"text,label\n\xff\xfe,a\n", "not UTF-8"),
        ("words.jsonl", b'{"text": "hello", "label": "a"}\n{oops\n', "line 2 is not JSON"),
        ("words.xlsx", b"PK", "only .csv, .tsv and .jsonl"),
    ],
)
def test_a_bad_file_says_what_is_wrong(
    page: Any, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    choose(page, path)
    expect(page.get_by_role("alert").filter(has_text=said)).to_be_visible()
    expect(page.locator(".preview")).to_have_count(0)
    teach(page)
    expect(page.locator("#teach-problem")).to_have_text("Choose a file first.")


def test_tables_are_read_as_the_server_reads_them(page: Any) -> None:
    text = '\ufefftext,label\r\n"a, ""b""\nc",x\r\n\r\nd,y'
    found = page.evaluate(
        """async text => {
            const { readRows } = await import("/page/rows.js");
            return (await readRows(new File([text], "t.csv"))).rows;
        }""",
        text,
    )
    assert found == [{"text": 'a, "b"\nc', "label": "x"}, {"text": "d", "label": "y"}]


def test_a_refusal_of_the_server_is_shown(
    visit: Callable[..., Watched], table: Callable[[str], Path]
) -> None:
    visited = visit()
    page = visited.open()
    answer = {"status": 429, "headers": {"Retry-After": "7"}, "json": {"detail": "Too many texts."}}
    page.route("**/v1/classify", lambda route: route.fulfill(**answer))
    page.route(
        "**/v1/tasks",
        lambda route: (
            route.fulfill(status=422, json={"detail": "Row 3 is empty."})
            if route.request.method == "POST"
            else route.continue_()
        ),
    )
    tick(page, find=True)
    page.get_by_label("Texts, one per line").fill("Hello")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#try-problem")).to_have_text("Too many texts. Try again in 7 s.")
    choose(page, table("refunds-refused"))
    teach(page)
    expect(page.locator("#teach-problem")).to_have_text("Row 3 is empty.")
    expect(page.locator(".preview")).to_be_visible()  # nothing that was filled in is lost
    visited.complaints.clear()  # Chromium itself reports every status of 4xx


def test_a_token_is_asked_for_and_sent(visit: Callable[..., Watched]) -> None:
    visited = visit()
    page = visited.page

    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer open-sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json={"detail": "A token is needed."})

    page.route("**/v1/**", guard)
    visited.open()
    field = page.get_by_label("Token", exact=True)
    expect(field).to_be_focused()
    field.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#token-problem")).to_have_text("That token was not accepted.")
    field.fill("open-sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#tasks-list > li").first).to_be_visible()
    expect(field).to_be_hidden()
    page.reload()
    expect(page.locator("#tasks-list > li").first).to_be_visible()
    expect(field).to_be_hidden()
    tick(page, find=True)
    ask(page, "Where is my parcel?")
    assert "open-sesame" not in page.content()
    assert "$TOKEN" in page.locator("#answers pre").text_content()
    visited.complaints.clear()  # Chromium itself reports every status of 4xx


def test_nothing_taught_says_what_to_do(visit: Callable[..., Watched]) -> None:
    visited = visit()
    page = visited.page
    nothing = {"model": "minilm", "method": "q-tuning", "tasks": []}
    queue = {"tasks": [], "queue_size": 10, "kept": [], "scales": [], "similarity": []}
    page.route("**/v1/tasks", lambda route: route.fulfill(json=nothing))
    page.route("**/v1/queue", lambda route: route.fulfill(json=queue))
    visited.open()
    expect(page.locator("#tasks-empty")).to_contain_text("Nothing is taught yet")
    expect(page.locator("#try-empty")).to_contain_text("Teach one first")
    expect(page.locator("#queue-empty")).to_contain_text("The queue is empty")
    expect(page.locator("#try-form")).to_be_hidden()


def test_odd_names_stay_text(visit: Callable[..., Watched]) -> None:
    visited = visit()
    page = visited.page
    odd = "<img src=x onerror=alert(1)>"
    task = {"name": odd, "labels": [odd, "b"], "is_pair": False, "metric": "accuracy", "version": 1,
            "validation_score": None, "test_score": None, "seconds": None, "has_key": False}  # fmt: skip
    queue = {"tasks": [odd, "b"], "queue_size": 2, "kept": [None, 0.4], "scales": [{"task": odd, "values": [1.0]}],
             "similarity": [[1.0, None], [None, 1.0]]}  # fmt: skip
    listed = {"model": odd, "method": odd, "tasks": [task]}
    page.route("**/v1/tasks", lambda route: route.fulfill(json=listed))
    page.route("**/v1/queue", lambda route: route.fulfill(json=queue))
    visited.open()
    expect(one_task(page, odd)).to_be_visible()
    expect(page.get_by_role("checkbox", name=odd)).to_be_checked()
    assert page.locator("img").count() == 0


def test_the_queue_is_drawn_and_told(page: Any, address: str) -> None:
    queue = httpx.get(f"{address}/v1/queue").json()
    figures = page.get_by_role("figure")
    expect(figures).to_have_count(3)
    for figure in figures.all():
        picture = figure.get_by_role("img")
        expect(picture).to_be_visible()
        assert len(picture.get_attribute("aria-label")) > 20
        figure.locator("summary").click()
        table = figure.get_by_role("table")
        expect(table).to_be_visible()
        expect(table.get_by_role("rowheader", name=queue["tasks"][0], exact=True)).to_be_visible()
    cells = figures.nth(1).locator("svg rect:not(.track)")
    expect(cells).to_have_count(sum(len(strip["values"]) for strip in queue["scales"]))
    kept = figures.nth(0).get_by_role("row").filter(has_text=queue["tasks"][-1])
    expect(kept).to_contain_text(f"{100 * queue['kept'][-1]:.1f} %")


def test_seventy_tasks_fit_on_a_phone(visit: Callable[..., Watched]) -> None:
    visited = visit(viewport={"width": 390, "height": 800})
    page = visited.page
    names = [f"support-topic-{i}" for i in range(70)]
    task = {"labels": ["yes", "no"], "is_pair": False, "metric": "accuracy", "version": 1,
            "validation_score": 0.9, "test_score": None, "seconds": 20.0, "has_key": True}  # fmt: skip
    listed = {
        "model": "minilm",
        "method": "q-tuning",
        "tasks": [{"name": name, **task} for name in names],
    }
    queue = {"tasks": names, "queue_size": 10, "kept": [0.5] * 70, "similarity": [[0.4] * 70] * 70,
             "scales": [{"task": name, "values": [0.9, 1.1] * 50} for name in names]}  # fmt: skip
    page.route("**/v1/tasks", lambda route: route.fulfill(json=listed))
    page.route("**/v1/queue", lambda route: route.fulfill(json=queue))
    visited.open()
    expect(page.get_by_role("figure").nth(1).locator("rect.less")).to_have_count(3500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if folder := os.environ.get("QTUNING_SHOTS"):
        page.locator("#queue").screenshot(path=Path(folder) / "seventy.png")


def test_everything_has_a_name_for_screen_readers(page: Any, table: Callable[[str], Path]) -> None:
    tick(page, find=True)
    ask(page, "Where is my parcel?")
    choose(page, table("refunds-named"))
    page.locator(".preview").wait_for()
    snapshot = page.locator("body").aria_snapshot()
    roles = "button|textbox|checkbox|img|link|figure|region|form|dialog|progressbar"
    unnamed = [
        line for line in snapshot.splitlines() if re.match(rf"\s*- ({roles})(?! \")\b", line)
    ]
    assert not [line for line in unnamed if not line.strip().startswith("- figure")]
    assert snapshot.count("- main") == 1
    unlabelled = page.evaluate("""() => [...document.querySelectorAll("input, textarea")]
        .filter(field => !field.labels?.length && !field.getAttribute("aria-label")).map(field => field.outerHTML)""")
    assert not unlabelled
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert levels.count(1) == 1
    twice = page.evaluate("""() => { const ids = [...document.querySelectorAll("[id]")].map(one => one.id);
        return ids.filter((id, i) => ids.indexOf(id) !== i); }""")
    assert not twice


CONTRAST = """() => {
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const linear = part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
    const behind = node => {
        for (let at = node; at; at = at.parentElement) {
            const [r, g, b, opacity = 1] = parse(getComputedStyle(at).backgroundColor);
            if (opacity === 1) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const poor = [];
    while (walker.nextNode()) {
        const words = walker.currentNode.textContent.trim();
        const node = walker.currentNode.parentElement;
        if (!words || !node.checkVisibility()) continue;
        const style = getComputedStyle(node);
        const ink = light(parse(node instanceof SVGElement ? style.fill : style.color));
        const paper = light(behind(node));
        const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
        if (ratio < 4.5) poor.push(`${node.tagName} ${ratio.toFixed(2)}: ${words.slice(0, 40)}`);
    }
    return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 390, 320])
def test_looks(
    visit: Callable[..., Watched], table: Callable[[str], Path], scheme: str, width: int
) -> None:
    """Nothing sticks out sideways, words have contrast; pictures go to $QTUNING_SHOTS where that is set."""
    page = visit(viewport={"width": width, "height": 900}, color_scheme=scheme).open()
    tick(page, find=True)
    ask(page, "Where is my parcel? Please track the package", "Zebras graze at dawn")
    choose(page, table("refunds-seen"))
    page.locator(".preview").wait_for()
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.evaluate(CONTRAST)
    if folder := os.environ.get("QTUNING_SHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{scheme}-{width}.png", full_page=True)


def test_less_motion_is_respected(visit: Callable[..., Watched]) -> None:
    page = visit(reduced_motion="reduce").open()
    tick(page, find=True)
    ask(page, "Where is my parcel?")
    moving = "[...document.querySelectorAll('*')].filter(n => getComputedStyle(n).transitionDuration !== '0s').length"
    assert page.evaluate(moving) == 0
