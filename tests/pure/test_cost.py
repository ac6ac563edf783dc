"""The formulas of collectives/cost.py against counts and figures known beforehand."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from stratagem.collectives import cost

REPLICAS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 64]


def test_imports_no_jax():
    tree = ast.parse(Path(cost.__file__).read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    }
    assert names == {"__future__", "collections", "dataclasses"}


@pytest.mark.parametrize(
    ("made", "rounds", "max_messages", "total_messages", "max_bytes", "total_bytes"),
    [
        (cost.ring(8, 800), 14, 14, 112, 1400, 11200),
        (cost.ring(4, 40, itemsize=4), 6, 6, 24, 6 * 12, 24 * 12),  # 10 elements, chunks of 3
        (cost.ring(3, 4, itemsize=4), 4, 4, 12, 16, 48),  # fewer elements than replicas
        (cost.tree(8, 100), 6, 3, 14, 300, 1400),
        (cost.tree(5, 100), 6, 3, 8, 300, 800),
        (cost.star(5, 100), 8, 4, 8, 400, 800),
        (cost.hierarchical(8, 100), 8, 4, 14, 400, 1400),  # two groups of four
        (cost.hierarchical(4, 100), 4, 2, 6, 200, 600),  # two groups of two
        (cost.hierarchical(9, 100, group_size=3), 8, 4, 16, 400, 1600),
        (cost.lower_bound(8, 800), 14, 14, 112, 1400, 11200),
    ],
)
def test_known_counts(made, rounds, max_messages, total_messages, max_bytes, total_bytes):
    assert made.rounds == rounds
    assert (made.max_messages, made.total_messages) == (max_messages, total_messages)
    assert (made.max_bytes, made.total_bytes) == (max_bytes, total_bytes)


def test_each_replica_by_hand():
    assert cost.star(4, 10, root=2).messages == (1, 1, 3, 1)
    assert cost.tree(6, 10).messages == (3, 1, 2, 1, 2, 1)
    assert cost.tree(6, 10).bytes_sent == (30, 10, 20, 10, 20, 10)
    assert cost.hierarchical(5, 10).messages == (3, 1, 1, 2, 1)  # {0, 1, 2}, {3, 4}
    # The second pack: leaders 1 and 4, of whom 4 leads.
    assert cost.hierarchical(5, 10, pack=1).messages == (1, 3, 1, 1, 2)


@pytest.mark.parametrize("p", REPLICAS)
def test_trees_of_any_shape_send_two_messages_an_edge(p):
    for made in (cost.star(p, 10), cost.tree(p, 10), cost.hierarchical(p, 10)):
        assert made.replicas == p
        assert made.total_messages == 2 * (p - 1)
        assert made.total_bytes == 20 * (p - 1)


@pytest.mark.parametrize("p", REPLICAS)
def test_closed_forms(p):
    n, alpha, beta, gamma = p * 60, 3.0, 5.0, 7.0
    log = math.ceil(math.log2(p))
    least = cost.lower_bound(p, n)
    assert cost.star(p, n).seconds(alpha, beta, gamma) == pytest.approx(
        2 * (p - 1) * (alpha + n * beta) + (p - 1) * n * gamma
    )
    assert cost.tree(p, n).seconds(alpha, beta, gamma) == pytest.approx(
        2 * log * (alpha + n * beta) + log * n * gamma
    )
    assert cost.tree(p, n).max_messages == log
    in_theory = 2 * (p - 1) * alpha + (p - 1) / p * n * (2 * beta + gamma)
    assert cost.ring(p, n).seconds(alpha, beta, gamma) == pytest.approx(in_theory)
    assert cost.ring(p, n) == least


@pytest.mark.parametrize("p", REPLICAS)
def test_no_algorithm_beats_the_lower_bound(p):
    for n in (1, 7, 1000, 1001):
        least = cost.lower_bound(p, n)
        for made in (cost.star(p, n), cost.tree(p, n), cost.ring(p, n), cost.hierarchical(p, n)):
            assert made.total_bytes >= 2 * (p - 1) * n
            assert made.serial_bytes >= least.serial_bytes


def test_small_values_suit_the_tree_and_large_ones_the_ring():
    alpha, beta = 50e-6, 1 / 1.25e9
    assert cost.tree(8, 1024).seconds(alpha, beta) < cost.ring(8, 1024).seconds(alpha, beta)
    large = 64 << 20
    assert cost.ring(8, large).seconds(alpha, beta) < cost.tree(8, large).seconds(alpha, beta)


def test_hundred_megabytes_between_eight_on_ten_gigabit_take_140_milliseconds():
    assert cost.ring(8, 100_000_000).seconds(0, 8 / 10e9) == pytest.approx(0.140)


def test_groups_are_about_the_square_root_and_hold_each_replica_once():
    assert [cost.best_group_size(p) for p in (1, 2, 4, 5, 8, 9, 16)] == [1, 2, 2, 3, 4, 3, 4]
    for p in REPLICAS:
        groups = cost.group_ranks(p)
        assert [rank for group in groups for rank in group] == list(range(p))
        rounds = len(groups[0]) - 1 + len(groups) - 1
        assert rounds <= max(2 * math.sqrt(p) - 1, 0)


def test_packs_take_turns_with_the_leaders():
    groups = cost.group_ranks(5)
    assert [cost.group_leaders(groups, pack) for pack in range(3)] == [(0, 3), (1, 4), (2, 3)]
    one = cost.hierarchical(8, 80)
    eight = cost.nothing(8)
    for pack in range(8):
        eight += cost.hierarchical(8, 10, pack=pack)
    assert eight.total_bytes == one.total_bytes
    assert eight.max_bytes < one.max_bytes


def test_costs_add_up():
    both = cost.ring(4, 40) + cost.tree(4, 8)
    assert both.rounds == 6 + 4
    assert both.messages == (8, 7, 8, 7)
    assert both.bytes_sent == (60 + 16, 60 + 8, 60 + 16, 60 + 8)
    assert both.serial_bytes == 60 + 32
    assert both.reduced_bytes == 30 + 16


def test_one_replica_sends_nothing():
    for made in (
        cost.nothing(1),
        cost.star(1, 9),
        cost.tree(1, 9),
        cost.ring(1, 9),
        cost.hierarchical(1, 9),
        cost.lower_bound(1, 9),
    ):
        assert made == cost.Cost(0, (0,), (0,), 0, 0)


def test_bus_bandwidth_is_the_link_speed_of_an_ideal_ring():
    link = 1.25e9
    for p in (2, 4, 8):
        seconds = cost.ring(p, 1 << 20).seconds(0, 1 / link)
        assert cost.bus_bandwidth(p, 1 << 20, seconds) == pytest.approx(link)


def test_errors():
    with pytest.raises(ValueError, match=r"at least one replica.*replicas=0, nbytes=4"):
        cost.ring(0, 4)
    with pytest.raises(ValueError, match=r"no negative size.*nbytes=-1"):
        cost.tree(2, -1)
    with pytest.raises(ValueError, match=r"a root from 0 to 3\. Got 4"):
        cost.star(4, 8, root=4)
    with pytest.raises(ValueError, match=r"whole elements of itemsize.*nbytes=6, itemsize=4"):
        cost.ring(2, 6, itemsize=4)
    with pytest.raises(ValueError, match=r"a group_size from 1 to 4 replicas\. Got 5"):
        cost.group_ranks(4, 5)
    with pytest.raises(ValueError, match=r"same replicas\. Got 2 and 3 replicas"):
        cost.tree(2, 8) + cost.tree(3, 8)
    with pytest.raises(ValueError, match=r"a positive time in seconds\. Got 0"):
        cost.bus_bandwidth(2, 8, 0)
