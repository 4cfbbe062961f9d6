"""Rows on disk -> tables, intervals, figures. Sees no model; each name loads its module when first used."""

from importlib import import_module

_HOME = {
    "Runs": "frames",
    "open_runs": "frames",
    "curve_table": "stats",
    "summary_table": "stats",
    "band_table": "bands",
    "crossover": "bands",
    "Crossover": "bands",
    "figure2": "figures",
    "plot_runs": "figures",
    "save_figure": "drawing",
    "rate_table": "rate_distortion",
    "rate_differences": "rate_distortion",
    "rate_figure": "rate_curves",
    "plot_rates": "rate_curves",
    "ranking_figure": "ranking_plot",
    "plot_ranking": "ranking_plot",
    "is_token_run": "correlations",
    "correlation_table": "correlations",
    "additivity_table": "additivity",
    "correlation_figure": "correlation_plot",
    "plot_correlations": "correlation_plot",
    "parameter_table": "parameters",
    "parameter_figure": "parameter_plot",
    "plot_parameters": "parameter_plot",
    "is_tuning": "tuning_report",
    "open_tuning": "tuning_report",
    "tuning_table": "tuning_report",
    "verdicts": "tuning_report",
    "describe_tuning": "tuning_report",
    "tuning_figure": "tuning_plot",
    "plot_tuning": "tuning_plot",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
