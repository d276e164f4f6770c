"""`calm colors --simulate`: policies that give pages their colors, on simulated caches."""
