"""The `shardline` command: puts the commands together, and turns errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 `plan` found work to do, 4 locked by
another run, 130 interrupted, 141 the reader of the output went away.
"""

import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated

import typer

from contracts.errors import ConfigError, ShardlineError
from flows.commands import chain, cleaning, data, datasets, machine, models, study
from flows.silence import SILENCE

# Flags after which several words may stand, as in --source a.jsonl b.jsonl.
SEVERAL = (
    *("--source", "--dataset", "--weights", "--epochs", "--tokens", "--subset"),
    *("--task", "--evaluation", "--quality", "--language", "--decontaminate"),
)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a damaged file must not drive the terminal

INTERRUPTED = 130

EPILOG = "Begin with: shardline init my-run && shardline run my-run/pipeline.yaml"


def build_app() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        name="shardline",
        help="From raw text to a measured language-model checkpoint, with a traceable origin for every number.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=False)(_options)
    for module in (chain, data, cleaning, datasets, models, study, machine):
        module.register(app)
    return app


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"shardline {metadata.version('shardline')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    for name, value in SILENCE.items():
        os.environ.setdefault(name, value)
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names and keys from outside may hold what no terminal shows
            stream.reconfigure(errors="backslashreplace")
    is_debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    logging.basicConfig(
        level=logging.DEBUG if is_debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if is_debug:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
    sys.exit(_run(spread(words), is_debug=is_debug))


def spread(words: Sequence[str]) -> list[str]:
    """Repeat a flag before each of its words: --source a b becomes --source a --source b."""
    result: list[str] = []
    flag = None
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0]
            flag = name if name in SEVERAL else None
        elif flag is not None and result[-1] != flag:
            result.append(flag)
        result.append(word)
    return result


def _run(words: list[str], *, is_debug: bool) -> int:
    try:
        for word in words:
            word.encode()
        _refuse_two_files(words)
        code = build_app()(args=words, standalone_mode=False)
        if code == INTERRUPTED:  # the parser turns Ctrl-C into this code and says nothing
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except ShardlineError as error:
        if is_debug:
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on.", INTERRUPTED)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:
        # The parser turns a broken pipe into a wordless exit code 1.
        if isinstance(end.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the parser's own errors
            return _usage(error)
        if is_debug:
            raise
        return _fail(_unexpected(error), 1)


def _refuse_two_files(words: Sequence[str]) -> None:
    """Refuse a second settings file: the parser would take the last and forget the first without a word.

    Raises:
        ConfigError: There are two.
    """
    if sum(word in ("-c", "--config") or word.startswith("--config=") for word in words) > 1:
        raise ConfigError("--config is given twice. Give one file, and change single settings with -s key=value.")


def _reader_gone() -> int:
    """End as programs do whose reader (head, less) went away: without a word, with the code of SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 128 + signal.SIGPIPE


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "shardline"
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    if message.startswith("No such option"):
        message += "; settings without a flag go through -s key=value (shardline schema STAGE --text lists them)"
    message = f"{message}." if message else ""
    return _fail(f"{message} Try: {command} --help" if message else f"Try: {command} --help", 2)


def _unexpected(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full ({error.filename or error}). Free some space and run the same command again; it goes on."
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{error.filename or 'a file'} may not be written or read ({error.strerror}). Check its permissions."
    if isinstance(error, OSError) and error.strerror:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the system refused a file"
        return f"{where}: {error.strerror}. Check the path, the disk it lies on, and the limits of the system (ulimit)."
    if isinstance(error, UnicodeEncodeError):
        name = str(error.object)[max(0, error.start - 60) : error.end + 60]
        return f"{name!r} is not valid UTF-8. Rename the file or folder."
    if isinstance(error, MemoryError):
        return "out of memory. Use fewer workers, a smaller micro_batch_size or batch_tokens, or a larger machine."
    return f"{type(error).__name__}: {error}. This is a defect of Shardline; --debug shows where."


def _fail(message: str, code: int) -> int:
    print(f"error: {_CONTROL.sub(lambda found: ascii(found[0])[1:-1], message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
