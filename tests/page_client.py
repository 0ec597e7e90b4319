"""`quantize` for pages: hands arguments, folder, environment and streams to page_server.py, and ends as it says.

    python -S -E tests/page_client.py SOCKET WORDS…

A process that imports torch and transformers takes seconds, this one 20 ms.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    asked = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [len(asked).to_bytes(8)], [0, 1, 2])
    connection.sendall(asked)
    answer = connection.recv(1)
if not answer:
    sys.exit("quantize: the process ended without an exit code")
sys.exit(answer[0])
