"""`calm completion`: the script that lets a shell complete calm's commands, options and allocators."""

import click
from click.shell_completion import get_completion_class

from calm.core.errors import CalmError

SHELLS = ("bash", "zsh", "fish")
# By this variable the script asks calm for what could follow; click looks for it.
_VARIABLE = "_CALM_COMPLETE"


@click.command(
    "completion",
    epilog="\b\nExamples:\n"
    '  eval "$(calm completion bash)"       for this shell; in ~/.bashrc, for all\n'
    '  eval "$(calm completion zsh)"        in ~/.zshrc, after compinit\n'
    "  calm completion fish >~/.config/fish/completions/calm.fish",
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes calm in a shell.

    Debian's package has it installed already.
    """
    made_by = get_completion_class(shell)
    if made_by is None:
        raise CalmError(f"this version of click knows no {shell}")
    script = made_by(context.find_root().command, {}, "calm", _VARIABLE).source()
    # Click's script for fish takes what is offered to end at a comma, which lists of allocators have.
    click.echo(script.replace('string split ","', 'string split --max 1 ","'))
