# Completion of calm in fish, loaded at the first TAB. calm itself generates the script.
calm completion fish | source
