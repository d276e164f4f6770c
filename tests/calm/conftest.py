"""The fixtures of calm's tests."""

from calm_fixtures import calm, compiled, traced

__all__ = ["calm", "compiled", "traced"]
