"""A service in a process of its own, with the obedient auditor:  python tests/served.py PORT LOG GRACE"""

from __future__ import annotations

import logging
import sys
from functools import partial

from recipes import obedient
from services import BAD, KEYS

from guardpaint.loop.audit_log import AuditLog
from guardpaint.serve.app import create_app
from guardpaint.serve.records import Records
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Settings
from guardpaint.serve.start import listen
from guardpaint.serve.supervisor import Supervisor

if __name__ == "__main__":
    port, path, grace = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    limits = Settings(keys=KEYS, batch=1, linger=0.0, grace=float(grace))
    supervisor = Supervisor(partial(obedient), limits, Records(AuditLog(path)))
    print(supervisor.process.process.pid, flush=True)
    listen(create_app(Service(supervisor, "tiny-sd", limits, BAD)), "127.0.0.1", int(port))
