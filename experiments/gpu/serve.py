"""The card behind a controller: how late actions begin and how far predictions are off, under a mixed load."""

from __future__ import annotations

from experiments.bench_worker import measure_lateness
from experiments.gpu.hardware import about, arguments, open_accelerator
from experiments.results_file import write_results

_SECONDS = 40.0


def main() -> None:
    """Serve, measure and write `serve.json`."""
    options = arguments(__doc__, seconds=_SECONDS)
    figures = measure_lateness(options.seconds, ["--device", options.device])
    for key, figure in figures.items():
        print(f"{key:40} {figure:12.2f}")
    write_results(
        "serve",
        figures,
        command=f"python -m experiments.gpu.serve --device {options.device}",
        seeds=list(range(7)),
        # Afterwards: the worker had the card to itself.
        extra={"hardware": about(open_accelerator(options.device))},
        directory=options.results,
    )


if __name__ == "__main__":
    main()
