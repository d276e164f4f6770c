"""Numbers that options take."""

import click
import pytest
from click.testing import CliRunner

from calm.core.options import FloatRange


@click.command()
@click.option("--number", type=FloatRange(min=0, min_open=True))
def program(number: float) -> None:
    click.echo(number)


@pytest.mark.parametrize("given", ["nan", "NaN", "-nan", "0", "-1", "x"])
def test_what_is_no_number_within_the_bounds_is_refused(given: str) -> None:
    result = CliRunner().invoke(program, [f"--number={given}"])
    assert result.exit_code == 2
    assert "Invalid value for '--number'" in result.output


def test_a_number_within_the_bounds_is_taken() -> None:
    assert CliRunner().invoke(program, ["--number=1.5"]).output == "1.5\n"
