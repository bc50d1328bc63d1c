"""Draw the pictures of the docs as SVG, those of docs/concepts.md in each of its languages: `python docs/pictures/draw.py`.

A test draws them again and compares. Standard library only; colours are read on white and on black.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent

BLUE, ORANGE, GREEN, RED, GREY = "#3f7fbf", "#d9822b", "#4c9a55", "#b8473f", "#808890"
COLOURS = (BLUE, ORANGE, GREEN, RED)

#: Language -> the words of the pictures. The last four are what a screen reader says of each.
LANGUAGES = {
    "en": {
        "worker": "worker",
        "batch": "batch",
        "model": "model",
        "whole": "whole",
        "part": "part",
        "gradients": "gradients",
        "mean": "the mean of all workers",
        "layers": "layers",
        "time": "time",
        "forward": "forward",
        "backward": "backward",
        "data": "Data parallelism: each worker has the whole model and a part of the batch",
        "sharded": "Fully sharded: each worker has a part of each parameter and a part of the batch",
        "pipe": "A pipeline: each worker has some layers; parts of the batch go through one after the other",
        "tensor": "Tensor parallelism: each worker has some columns of a matrix and the whole batch",
    },
    "es": {
        "worker": "worker",
        "batch": "lote",
        "model": "modelo",
        "whole": "entero",
        "part": "parte",
        "gradients": "gradientes",
        "mean": "la media de todos los workers",
        "layers": "capas",
        "time": "tiempo",
        "forward": "adelante",
        "backward": "atrás",
        "data": "Paralelismo de datos: cada worker tiene el modelo entero y una parte del lote",
        "sharded": "Fragmentación completa: cada worker tiene una parte de cada parámetro y una parte del lote",
        "pipe": "Pipeline: cada worker tiene algunas capas; las partes del lote pasan una tras otra",
        "tensor": "Paralelismo de tensores: cada worker tiene algunas columnas de una matriz y el lote entero",
    },
    "pt": {
        "worker": "worker",
        "batch": "lote",
        "model": "modelo",
        "whole": "inteiro",
        "part": "parte",
        "gradients": "gradientes",
        "mean": "a média de todos os workers",
        "layers": "camadas",
        "time": "tempo",
        "forward": "ida",
        "backward": "volta",
        "data": "Paralelismo de dados: cada worker tem o modelo inteiro e uma parte do lote",
        "sharded": "Fragmentação completa: cada worker tem uma parte de cada parâmetro e uma parte do lote",
        "pipe": "Pipeline: cada worker tem algumas camadas; as partes do lote passam uma após a outra",
        "tensor": "Paralelismo de tensores: cada worker tem algumas colunas de uma matriz e o lote inteiro",
    },
    "ru": {
        "worker": "воркер",
        "batch": "батч",
        "model": "модель",
        "whole": "вся",
        "part": "часть",
        "gradients": "градиенты",
        "mean": "среднее по всем воркерам",
        "layers": "слои",
        "time": "время",
        "forward": "прямой",
        "backward": "обратный",
        "data": "Параллелизм по данным: у каждого воркера вся модель и часть батча",
        "sharded": "Полное шардирование: у каждого воркера часть каждого параметра и часть батча",
        "pipe": "Конвейер: у каждого воркера несколько слоёв, части батча идут одна за другой",
        "tensor": "Тензорный параллелизм: у каждого воркера несколько столбцов матрицы и весь батч",
    },
}


def box(x: float, y: float, width: float, height: float, colour: str, text: str = "", *, hollow: bool = False) -> str:
    """A rectangle with a text in its middle."""
    fill = f'fill="none" stroke="{colour}" stroke-width="2"' if hollow else f'fill="{colour}"'
    ink = colour if hollow else "#ffffff"
    drawn = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" {fill}/>'
    return drawn + (label(x + width / 2, y + height / 2 + 5, text, ink) if text else "")


def label(x: float, y: float, text: str, colour: str = GREY, anchor: str = "middle") -> str:
    """A line of text; y is that of its baseline."""
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> str:
    """A line with a head at its end, or at both."""
    ends = 'marker-end="url(#head)"' + (' marker-start="url(#head)"' if both else "")
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{GREY}" stroke-width="2" {ends}/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole file. `title` is what a screen reader says of it."""
    head = (
        f'<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto-start-reverse">'
        f'<path d="M0 0L10 5L0 10z" fill="{GREY}"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="14">\n<title>{escape(title)}</title>\n<defs>{head}</defs>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def data_parallel(say: dict[str, str]) -> str:
    """Three workers with the whole model, each with a part of the batch; their gradients become one mean."""
    parts = [label(20, 36, say["batch"], anchor="start")]
    for rank in range(3):
        x = 120 + rank * 170
        colour = COLOURS[rank]
        parts += [
            box(x, 18, 130, 28, colour, f"{say['part']} {rank}"),
            arrow(x + 65, 48, x + 65, 74),
            box(x, 78, 130, 62, GREY, f"{say['model']} ({say['whole']})", hollow=True),
            label(x + 65, 160, f"{say['worker']} {rank}", colour),
            arrow(x + 65, 168, x + 65, 196),
        ]
    parts += [box(120, 200, 470, 30, GREY, f"{say['gradients']}: {say['mean']}")]
    return picture(610, 248, say["data"], parts)


def fully_sharded(say: dict[str, str]) -> str:
    """Three workers with a third of each parameter; a layer is put together while it computes."""
    parts = [label(20, 36, say["batch"], anchor="start")]
    for rank in range(3):
        x = 120 + rank * 170
        parts += [box(x, 18, 130, 28, COLOURS[rank], f"{say['part']} {rank}"), arrow(x + 65, 48, x + 65, 74)]
        for third in range(3):
            parts.append(
                box(x + 5 + third * 41, 82, 37, 54, COLOURS[third] if third == rank else GREY, hollow=third != rank)
            )
        parts.append(label(x + 65, 160, f"{say['worker']} {rank}", COLOURS[rank]))
        if rank:
            parts.append(arrow(x - 36, 109, x - 4, 109, both=True))
    return picture(610, 176, say["sharded"], parts)


def pipeline(say: dict[str, str]) -> str:
    """Three workers with a third of the layers each, and what each does as time goes on (GPipe's schedule, 4 microbatches)."""
    parts, step, left = [], 38, 150
    for stage in range(3):
        y = 24 + stage * 44
        parts.append(
            label(
                20,
                y + 22,
                f"{say['worker']} {stage}: {say['layers']} {stage * 4}-{stage * 4 + 3}",
                COLOURS[stage],
                "start",
            )
        )
        # A forward pass takes one step, a backward pass as well here; the last stage begins with the backward passes.
        begun = {("F", batch): stage + batch for batch in range(4)}
        begun |= {("B", batch): 6 + (2 - stage) + batch for batch in range(4)}
        for (kind, batch), at in begun.items():
            parts.append(
                box(left + 40 + at * step, y, step - 3, 34, COLOURS[stage], f"{kind}{batch}", hollow=kind == "B")
            )
    parts += [arrow(left + 40, 162, left + 40 + 12 * step, 162), label(left + 40 + 6 * step, 184, say["time"])]
    parts.append(label(20, 184, f"F {say['forward']}, B {say['backward']}", anchor="start"))
    return picture(left + 60 + 12 * step, 200, say["pipe"], parts)


def tensor_parallel(say: dict[str, str]) -> str:
    """One matrix, cut by columns over two workers; each has all rows of the batch."""
    parts = [box(20, 30, 110, 90, GREY, say["batch"], hollow=True), label(150, 80, "x")]
    for rank in range(2):
        parts.append(box(172 + rank * 84, 30, 80, 90, COLOURS[rank], f"{say['part']} {rank}"))
        parts.append(box(374 + rank * 84, 30, 80, 90, COLOURS[rank], hollow=True))
        parts.append(label(212 + rank * 84, 142, f"{say['worker']} {rank}", COLOURS[rank]))
        parts.append(label(414 + rank * 84, 142, f"{say['worker']} {rank}", COLOURS[rank]))
    parts.append(label(355, 80, "="))
    return picture(560, 158, say["tensor"], parts)


def architecture() -> str:
    """The processes of a run, from left to right, and the files and links between them."""
    title = "The processes of a run (your command, the supervisor, an agent, the workers), and the folder that all of them share"
    columns = (
        (BLUE, "your command", "copies the source,", "writes the job, starts", "the supervisor, ends"),
        (ORANGE, "supervisor", "one for each run: gets", "nodes, prepares them,", "starts and watches"),
        (GREEN, "agent", "one on each machine", "elsewhere: runs command", "lines, sends files back"),
        (RED, "workers", "one for each rank: set", "the rank's variables,", "run your script"),
    )
    parts = []
    for at, (colour, name, *lines) in enumerate(columns):
        x = 20 + 240 * at
        parts += [box(x, 30, 200, 120, colour, hollow=True), box(x, 30, 200, 30, colour, name)]
        parts += [label(x + 100, 84 + 22 * row, text) for row, text in enumerate(lines)]
    parts += [arrow(222, 90, 258, 90), arrow(462, 90, 498, 90, both=True), arrow(702, 90, 738, 90)]
    parts += [
        label(240, 172, "command line"),
        label(480, 172, "pipe of ssh, srun or Ray"),
        label(720, 172, "command line"),
    ]
    files = ("job.json, state.json", "logs and metrics by rank", "outputs, checkpoints", "copy of the source")
    parts += [box(20, 230, 920, 80, GREY, hollow=True), label(480, 256, "the run's folder: <workspace>/runs/<run id>/")]
    parts += [label(140 + 226 * at, 290, text) for at, text in enumerate(files)]
    parts += [arrow(x, 184, x, 226) for x in (120, 360, 840)]
    parts += [label(600, 212, "the agent mirrors files that have grown")]
    parts += [
        arrow(480, 346, 480, 314),
        label(480, 366, "read by paceline logs, show and list, by the page, by sweeps and pipelines"),
    ]
    return picture(960, 384, title, parts)


#: Name of the file -> the function that draws it.
PICTURES: dict[str, Callable[[dict[str, str]], str]] = {
    "data-parallel": data_parallel,
    "fully-sharded": fully_sharded,
    "pipeline-parallel": pipeline,
    "tensor-parallel": tensor_parallel,
}


def draw() -> dict[str, str]:
    """Name of each file, in each language -> its text. English has no language in its name."""
    by_language = {
        f"{name}.svg" if language == "en" else f"{name}.{language}.svg": paint(words)
        for language, words in LANGUAGES.items()
        for name, paint in PICTURES.items()
    }
    return {**by_language, "architecture.svg": architecture()}


if __name__ == "__main__":
    for file, text in draw().items():
        (HERE / file).write_text(text)
