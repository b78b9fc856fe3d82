"""The demo's picture: training and validation loss over steps."""

from __future__ import annotations

from pathlib import Path

from dmuown.automodel.summary import RunSummary


def plot_losses(summary: RunSummary, file: Path, *, title: str) -> Path:
    """Draw both curves of a run into a PNG and return its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(list(summary.losses), list(summary.losses.values()), color="tab:blue", alpha=0.6, label="training")
    for losses in summary.validation_losses.values():
        axes.plot(list(losses), list(losses.values()), "o-", color="tab:orange", label="validation, held-out modules")
    axes.set(title=title, xlabel="step", ylabel="cross-entropy a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
