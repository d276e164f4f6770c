"""`bench/paper`: a paper's tables measured again, beside what it published."""
