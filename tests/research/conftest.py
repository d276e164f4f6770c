"""The fixtures of calm's tests, for the commands that research/ adds."""

from calm_fixtures import calm, compiled, traced

__all__ = ["calm", "compiled", "traced"]
