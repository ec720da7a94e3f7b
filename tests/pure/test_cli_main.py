"""One place decides what the user sees of an error, and which number the shell gets."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from overlap_pass.cli import looks
from overlap_pass.cli import main as frame
from overlap_pass.errors import OptionError


@pytest.fixture
def run(monkeypatch):
    """Runs a command whose body is the given function."""

    def run_command(body, *flags: str) -> int:
        def add_parser(subparsers):
            subparsers.add_parser("probe").set_defaults(run=body)

        monkeypatch.setattr(frame, "COMMANDS", (SimpleNamespace(add_parser=add_parser),))
        return frame.main([*flags, "probe"] if "--debug" not in flags else ["probe", *flags])

    return run_command


def raises(error: BaseException):
    def body(args):
        raise error

    return body


def test_the_exit_code_is_what_the_command_returns(run):
    assert run(lambda args: 0) == 0
    assert run(lambda args: 1) == 1


def test_an_error_of_ours_is_one_line_and_exit_code_2(run, capsys):
    assert run(raises(OptionError("world=1 is too small:\n  at least 2"))) == 2
    assert capsys.readouterr() == ("", "overlap-pass: error: world=1 is too small: at least 2\n")


def test_an_unexpected_error_is_one_line_with_a_hint_and_exit_code_1(run, capsys):
    assert run(raises(ZeroDivisionError("division by zero"))) == 1
    assert capsys.readouterr().err == (
        "overlap-pass: unexpected ZeroDivisionError: division by zero (run again with --debug for the traceback)\n"
    )


def test_debug_shows_the_traceback_and_then_the_same_line(run, capsys):
    assert run(raises(OptionError("no")), "--debug") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "overlap-pass: error: no"


def test_a_missing_module_points_to_doctor(run, capsys):
    assert run(raises(ModuleNotFoundError("No module named 'torch'"))) == 2
    assert "No module named 'torch'; `overlap-pass doctor`" in capsys.readouterr().err


def test_an_interrupt_is_quiet_and_130(run, capsys):
    assert run(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "overlap-pass: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND (see overlap-pass --help)"),
        (["dem"], "invalid choice: 'dem'"),
        (["doctor", "--jsn"], "--jsn is not known (see overlap-pass doctor --help)"),
        (["demo", "--world", "many"], "argument --world: invalid int value: 'many' (see overlap-pass demo --help)"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        frame.main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("overlap-pass: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_debug_is_accepted_before_and_behind_the_command():
    parser = frame.build_parser()
    assert parser.parse_args(["--debug", "doctor"]).debug
    assert parser.parse_args(["doctor", "--debug"]).debug
    assert not parser.parse_args(["doctor"]).debug


def start(*arguments: str, **options) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "overlap_pass", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def test_a_reader_that_goes_away_is_no_error():
    process = start("doctor")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_version_and_help_need_no_torch():
    program = "import sys; sys.modules['torch'] = None; from overlap_pass.cli.main import main; main(sys.argv[1:])"  # no torch
    for arguments, expected in ((["--version"], "overlap-pass 0.1.0\n"), (["--help"], "doctor")):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_every_command_that_answers_can_answer_in_json():
    [commands] = [action.choices for action in frame.build_parser()._actions if action.dest == "command"]
    flags = {name: set(parser._option_string_actions) for name, parser in commands.items()}
    assert {name for name in flags if "--json" not in flags[name]} == {"completion"}


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_of_every_command_keeps_to_the_terminal_and_names_what_values_are(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    [commands] = [action.choices for action in frame.build_parser()._actions if action.dest == "command"]
    for parser in commands.values():
        text = parser.format_help()
        assert max(map(len, text.splitlines())) <= int(columns)
        valued = [action for action in parser._actions if action.option_strings and action.nargs != 0]
        assert all(action.metavar for action in valued), text


def test_the_name_of_a_command_and_what_it_does_begin_on_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = frame.build_parser().format_help().splitlines()
    names = [module.__name__.rpartition(".")[2] for module in frame.COMMANDS]
    assert [
        line.split()[0] for line in lines if line.startswith("    ") and len(line.split()) > 1 and line[4] != " "
    ] == names


def test_help_says_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit):
        frame.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    codes = (0, 1, frame.EXIT_REFUSED, frame.EXIT_INTERRUPTED, frame.EXIT_BROKEN_PIPE)
    assert {code for code in codes if f"{code} " not in printed.partition("Exit codes:")[2]} == set()


@pytest.mark.parametrize(
    ("terminal", "no_color", "expected"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colours_are_for_terminals_that_want_them(monkeypatch, terminal, no_color, expected):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert looks.colour() is expected
