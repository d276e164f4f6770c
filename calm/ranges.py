"""Types of options that click has not."""

import click


class FloatRange(click.FloatRange):
    """A number within bounds. click's lets NaN through, which is neither below nor above any."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number
