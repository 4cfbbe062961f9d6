"""The names that other people's scripts import."""

from __future__ import annotations

import inspect
from pkgutil import iter_modules

import pytest

import forward_influence
import infokv
from forward_influence import analysis

NAMES = {
    forward_influence: (
        "load_model load_documents measure influence kl_divergence token_signals Selector MaskingEngine "
        "InfluenceCurve RunSpec register_selector open_runs fidelity tune"
    ),
    infokv: (
        "compress Budget Schedule Scorer TokenSignals register get_scorer restricted_entropy InfoKV SnapKV PyramidKV "
        "FastKV ExpectedAttention RPC SelfInformation StreamingLLM H2O ObservedAttention TOVA KNorm KeyDiff LagKV RKV "
        "Random FullCache"
    ),
}


@pytest.mark.parametrize(("package", "names"), NAMES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_names_are_there_and_documented(package, names):
    for name in names.split():
        assert name in package.__all__
        assert name in dir(package)
        found = getattr(package, name)
        assert inspect.getdoc(found), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_every_listed_name_loads():
    for package in NAMES:
        for name in package.__all__:
            assert getattr(package, name) is not None


@pytest.mark.parametrize("package", NAMES, ids=lambda one: one.__name__)
def test_no_name_is_that_of_a_module(package):
    """The import of a module would put it in the place of what has its name."""
    from pkgutil import iter_modules

    assert not set(package.__all__) & {one.name for one in iter_modules(package.__path__)}


def test_keywords_of_measure_are_the_flags():
    from forward_influence.cli.measure import command

    flags = set(inspect.signature(command).parameters)
    assert flags == set(inspect.signature(forward_influence.measure).parameters)


def test_no_name_of_the_package_is_that_of_a_module():
    """The import of a module would put it in the place of what has its name."""
    assert not set(analysis.__all__) & {one.name for one in iter_modules(analysis.__path__)}
