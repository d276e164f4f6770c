"""Researchers' commands of calm, and the papers' tables measured again. Only a checkout has this package."""
