"""`calm calibrate` and `calm predict`: what TLB shootdowns cost here, and would on another machine."""
