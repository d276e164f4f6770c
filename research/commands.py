"""The commands that this package adds to calm; its entry points name them."""

from calm.core.plugins import Listed

BENCH = Listed(
    "research.bench.command",
    "Compare allocators on a suite of programs.",
    "How do allocators compare on many programs?",
    "calm bench run",
)
CALIBRATE = Listed(
    "research.predict.calibrate",
    "Measure what a TLB shootdown costs on this machine.",
    "What does a TLB shootdown cost here?",
    "calm calibrate shootdowns",
)
COLORS = Listed(
    "research.colors.command",
    "Show page colors, and large blocks that collide in caches.",
    "Do large arrays evict each other from the cache?",
    "calm colors run -- ./solver input",
)
LAB = Listed(
    "research.lab.command",
    "Count a program's TLB interrupts on an emulated machine.",
    "How many interrupts would 16 CPUs see?",
    "calm lab --cpus 16 --sockets 4 -a glibc,calmalloc -- ./server-test --threads 16",
)
PREDICT = Listed(
    "research.predict.command",
    "Predict what TLB shootdowns cost on another machine.",
    "What would it cost on a machine that I do not have?",
    "calm predict run --cpus 64 --sockets 4 --virt -a glibc,calmalloc -- build/release/listing1",
)
