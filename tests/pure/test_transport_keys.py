"""The keys of the transport: of the job, in a file, and of the user."""

from __future__ import annotations

import os
import stat

import pytest

from stratagem.cluster.keys import FILE_VARIABLE, VARIABLE, Key
from stratagem.transport import curve

SECRET = "a secret of sixteen characters"


def test_a_key_may_lie_in_a_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(SECRET + "\n")
    path.chmod(0o440)
    assert Key.of({FILE_VARIABLE: str(path)}) == Key(SECRET)
    assert Key.always({FILE_VARIABLE: str(path)}) == Key(SECRET)


@pytest.mark.parametrize(
    ("mode", "text", "error"),
    [
        (0o644, SECRET, "expected a key that others cannot read. Got .* with mode 644. Run `chmod"),
        (0o620, SECRET, "with mode 620"),
        (0o600, " \n", "expected a key in .*Got an empty file"),
        (0o600, "short", "expected at least 16 characters. Got 5"),
    ],
)
def test_a_file_that_is_no_good_is_an_error(tmp_path, mode, text, error):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ValueError, match=error):
        Key.of({FILE_VARIABLE: str(path)})


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected a file with a key. Got .*: No such file"):
        Key.of({FILE_VARIABLE: str(tmp_path / "none")})


def test_a_key_comes_from_one_place(tmp_path):
    with pytest.raises(ValueError, match=f"Expected {VARIABLE} or {FILE_VARIABLE}. Got both"):
        Key.of({VARIABLE: SECRET, FILE_VARIABLE: str(tmp_path)})


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "XDG_CACHE_HOME"])
def test_the_users_key_is_made_once_and_for_the_user_alone(tmp_path, variable):
    key = Key.always({variable: str(tmp_path)})
    assert key.users
    assert len(key.secret) == 64
    assert Key.always({variable: str(tmp_path)}) == key
    assert os.listdir(tmp_path / "stratagem") == ["key"]
    assert stat.S_IMODE((tmp_path / "stratagem" / "key").stat().st_mode) == 0o600
    assert not Key.of({variable: str(tmp_path)}).secret


def test_a_users_key_that_cannot_be_kept_is_an_error(tmp_path):
    (tmp_path / "stratagem").write_text("")
    with pytest.raises(ValueError, match="Expected to keep the user's key in .*Set STRATAGEM_CLUS"):
        Key.always({"XDG_RUNTIME_DIR": str(tmp_path)})


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to give files away")
def test_a_users_key_of_another_user_is_refused(tmp_path):
    Key.always({"XDG_RUNTIME_DIR": str(tmp_path)})
    os.chown(tmp_path / "stratagem" / "key", 1, 1)
    with pytest.raises(ValueError, match="Got a file of user 1"):
        Key.always({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_the_keys_of_a_secret_are_the_same_everywhere():
    first, other = curve.pairs(SECRET), curve.pairs(SECRET + "x")
    assert len(first.listener.public) == 40
    curve.pairs.cache_clear()
    assert curve.pairs(SECRET) == first
    publics = {pair.public for keys in (first, other) for pair in (keys.listener, keys.connector)}
    assert len(publics) == 4
