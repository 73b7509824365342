"""Hostile names, a few of each kind: reliability/names.py tries all of them on every surface."""

import itertools

import numpy as np
import pytest

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.order import random_keys
from rankgrad.inert import SENTENCE, inert, inert_cell, inert_line
from rankgrad.training.config import Config, Loss, dumps, loads
from reliability import names

SHORT = [piece for piece in names.PIECES if len(piece) < 1_000]
FEW = ["<script>window.pwned=1</script>", "\x1b]0;title\x07two\nlines", "\u202e[bold]\x9b31m", "=cmd|' /C calc'!A0"]


@pytest.mark.parametrize("name", SHORT)
def test_nothing_that_steers_is_left_and_a_row_is_one_line(name):
    for text in (inert(name), inert_line(f"there is no {name}; look again"), str(inert_cell(name))):
        assert names.steering(text) == "" and "\n" not in text


def test_signs_of_east_asian_keyboards_begin_formulas_too():
    for text in ("\uff1d1+1", "\uff0b1", "\uff0d1", " \uff20SUM(A1)"):
        assert inert_cell(text) == f"'{text}"


def test_letters_of_every_language_stay_as_they_are():
    for text in ("日本\u3000語", "می\u200cخواهم", "👩\u200d👧", "caf\u00e9\u00a0x", "-1", "1e-5"):
        assert inert(text) == inert_cell(text) == text


def test_a_sentence_ends_with_what_to_do_however_long_a_name_in_it_is():
    said = inert_line(f"{'x' * 1_000_000} does not exist; check the path")
    assert len(said) < SENTENCE + 10 and said.endswith("check the path")


@pytest.mark.parametrize("attempt", [names.try_csv, names.try_trec])
def test_rankings_hold_names_as_data(monkeypatch, attempt):
    monkeypatch.setattr(names, "PIECES", tuple(SHORT))
    found = attempt(len(SHORT), 0)
    assert (found.tried, found.failures) == (len(SHORT), [])


def test_configurations_hold_names_as_data():
    for name in map(names.storable, SHORT):
        config = Config(loss=Loss("softmax", {name: name}))
        assert loads(dumps(config), "config.toml") == config


def test_a_page_is_made_of_nothing_but_its_own_elements():
    assert names.wrong_in_page(names.write_page("".join(FEW), 1), 1) == ""


def test_a_mistake_is_one_inert_line():
    with names.workplace():
        for arguments in names.mistakes("".join(FEW)):
            code, out, err = names.called(*arguments)
            assert names.wrong_in_text(code, out, err) == ""
            assert code == 0 or (out, err.count("\n")) == ("", 1)


def test_commands_print_names_that_steer_nothing():
    with names.workplace():
        for command, found in itertools.islice(names.commands(FEW), 4):
            assert (command, found[0], names.wrong_in_text(*found)) == (command, 0, "")


def test_one_endless_id_among_many_is_refused_before_memory_is_taken_for_all():
    ids = np.array(["x" * 1_000_000, *map(str, range(99))], object)
    with pytest.raises(ValueError, match=r"1,000,000 characters.*GiB"):
        RankingDataset(np.zeros((100, 1)), np.zeros(100), [0, 100], ["q"], document_ids=ids)


def test_an_endless_query_id_has_a_key_at_once_and_others_keep_theirs():
    few, endless = np.array(["a", "b" * 10_000]), np.array(["a", "b" * 10_000, "x" * 1_000_000, "y" * 1_000_000])
    keys = random_keys(endless, 3)
    assert (keys[:2] == random_keys(few, 3)).all() and len(set(keys.tolist())) == 4
