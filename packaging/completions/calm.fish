# Completion of calm in fish, loaded at the first TAB. The script is calm's own, by what it is installed with.
calm completion fish | source
