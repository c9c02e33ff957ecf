"""Figure 7: how low the SLO can go (left), and beside batch clients (right).

See `fig7_left` and `fig7_right`. Writes `fig7.json`, `fig7_left.csv`, `fig7_right.csv` and `fig7.png`, whose
upper row is the paper's left column, a panel for each rate, and its lower row the right column.
"""

from __future__ import annotations

from pathlib import Path

from experiments.clockwork_paper import fig7_left, fig7_right
from experiments.clockwork_paper.fig7_left import Setting
from experiments.results_file import RESULTS
from experiments.study.report import picture, write_csv, write_figure
from experiments.study.study import from_command_line


def produce(
    setting: Setting, directory: Path = RESULTS
) -> tuple[list[fig7_left.Curve], list[fig7_right.Shared]]:
    """Measure everything and write it."""
    left = fig7_left.measure_all(setting)
    right = fig7_right.measure_all(setting)
    write_csv(directory / "fig7_left.csv", fig7_left.COLUMNS, fig7_left.table_of(setting, left))
    write_csv(directory / "fig7_right.csv", fig7_right.COLUMNS, fig7_right.table_of(setting, right))
    columns = max(len(setting.rates_rps), len(setting.scenarios))
    with picture(directory / "fig7.png", 2, columns, size=(4.2 * columns, 6.6)) as grid:
        fig7_left.draw(grid[0, : len(setting.rates_rps)], left)
        fig7_right.draw(grid[1, : len(setting.scenarios)], right)
        for row, used in enumerate((len(setting.rates_rps), len(setting.scenarios))):
            for panel in grid[row, used:]:
                panel.set_axis_off()
    write_figure(
        "fig7",
        fig7_left.figures_of(left) | fig7_right.figures_of(setting, right),
        fig7_left.comparisons(left) + fig7_right.comparisons(right),
        setting,
        directory=directory,
    )
    return left, right


def main() -> None:
    """Produce the figure."""
    produce(from_command_line("Figure 7 of the paper.", Setting()))


if __name__ == "__main__":
    main()
