"""The paper's web server and load generator: Apache with its event module, and wrk.

For each request, Apache maps the page's file, sends it and unmaps it, if it is configured neither to let the
kernel send files nor to read them. Each program has separate CPUs; wrk has the last ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from calm.core.errors import CalmError
from research.lab.payload import Payload

from . import abis_packages
from .abis_guest import FOLDER, words

PACKAGES = (*abis_packages.APACHE, *abis_packages.WRK)
CONNECTIONS = 64
WARM_UP_S, SECONDS = 3, 10
_CONFIGURATION = f"{FOLDER}/apache.conf"
_PAGES = "/srv/www"
_ADDRESS = "127.0.0.1:8080"
# The size of the server's default page.
_PAGE_BYTES = 10_701
_MODULES = ("mpm_event", "authz_core", "dir")
# The user ID of the server's children.
_USER = 33

# Apache's and Debian's defaults, except for the paper's settings.
_SETTINGS = f"""\
ServerName localhost
Listen {_ADDRESS}
PidFile /tmp/apache.pid
Mutex file:/tmp default
User #{_USER}
Group #{_USER}
ErrorLog /tmp/apache.errors
LogFormat "%h %l %u %t \\"%r\\" %>s %O" common
BufferedLogs On
CustomLog /tmp/apache.access common
EnableMMAP On
EnableSendfile Off
StartServers 2
ThreadsPerChild 25
MaxRequestWorkers 150
DocumentRoot {_PAGES}
DirectoryIndex index.html
<Directory {_PAGES}>
    Require all granted
</Directory>
"""


def script(servers: int, generators: int) -> str:
    """The numbers of CPUs for the server and, after them, for the load generator."""
    program = abis_packages.program("apache2-bin", "apache2")
    generator = abis_packages.program("wrk", "wrk")
    url = f"http://{_ADDRESS}/"
    load = words(generator, "-t", generators, "-c", CONNECTIONS, "--timeout", "30s")
    return f"""
ip link set lo up
chmod 1777 /tmp
taskset -c 0-{servers - 1} {words(program, "-f", _CONFIGURATION, "-DFOREGROUND")} &
tries=0
until wget -q -O /dev/null {url}; do
    tries=$((tries + 1))
    if [ $tries -gt 120 ]; then
        cat /tmp/apache.errors >&2
        exit 1
    fi
    sleep 0.5
done
cpus={servers}-{servers + generators - 1}
# Under load it starts more children and threads, once.
taskset -c $cpus {load} -d {WARM_UP_S}s {url} >/dev/null
count {load} -d {SECONDS}s {url}
"""


def add(files: Payload) -> None:
    """The files that the script needs."""
    modules = abis_packages.CACHE / "apache2-bin/usr/lib/apache2/modules"
    files.program(abis_packages.program("apache2-bin", "apache2"))
    files.program(abis_packages.program("wrk", "wrk"))
    load = ""
    for name in _MODULES:
        path = modules / f"mod_{name}.so"
        files.library(path)
        load += f"LoadModule {name}_module {path}\n"
    files.make(_CONFIGURATION, (load + _SETTINGS).encode(), 0o644)
    line = "The page that a server shows before it has any other.\n"
    page = f"<!DOCTYPE html>\n<title>It works</title>\n<pre>\n{line * _PAGE_BYTES}"
    files.make(f"{_PAGES}/index.html", page[:_PAGE_BYTES].encode(), 0o644)
    users = f"root:x:0:0:root:/root:/bin/sh\nwww:x:{_USER}:{_USER}:www:/:/bin/false\n"
    files.make("/etc/passwd", users.encode(), 0o644)
    files.make("/etc/group", f"root:x:0:\nwww:x:{_USER}:\n".encode(), 0o644)


def requests(lines: Sequence[str]) -> int:
    """The number of requests answered, from wrk's output. A refused or unanswered request is an error.

    Read errors are not: when all its threads are busy, the server closes idle connections.
    """
    text = "\n".join(lines)
    unanswered = r"^ *(Non-2xx .*|Socket errors: (?!connect 0, read \d+, write 0, timeout 0).*)$"
    if failed := re.search(unanswered, text, re.MULTILINE):
        raise CalmError(f"wrk: {failed[1]}")
    found = re.search(r"(\d+) requests in ", text)
    if not found or not int(found[1]):
        raise CalmError(f"wrk: no request was answered: {text.strip() or 'no output'}")
    return int(found[1])
