"""Answers of another host's ports to somebody without a token: a line a port, `ADDRESS:PORT ANSWER`.

An answer is a status of HTTP or of gRPC; Ray's servers are asked for what each kind of them tells.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request

import grpc

METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",  # the GCS
    "NodeManagerService/GetNodeStats",  # a raylet
    "ObjectManagerService/Pull",  # a raylet, at its other port
    "CoreWorkerService/GetCoreWorkerStats",  # a worker or driver
    "RayletDriver/ClusterInfo",  # the server of Ray's client
    "ReporterService/GetTraceback",  # the dashboard's agent
)
PATIENCE_S = 10.0


def over_http(address: str) -> str | None:
    """Status of a page; None where no HTTP is spoken."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, http.client.HTTPException):
        return None


def over_grpc(address: str) -> str:
    """Status of the first of Ray's methods that the server has."""
    with grpc.insecure_channel(address) as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=PATIENCE_S)
                return "OK"
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    return error.code().name
    return "UNIMPLEMENTED"


if __name__ == "__main__":
    for address in sys.argv[1:]:
        print(address, over_http(address) or over_grpc(address), flush=True)
