"""A client to be killed: connects, says so, then makes the one call that a line of JSON on its standard input names."""

from __future__ import annotations

import json
import sys

import grpc

from tests.harness.calls import Calls
from tests.harness.pair import CHANNEL_OPTIONS
from tightship.v1 import containerizer_pb2 as cpb


def main() -> None:
    run_dir = sys.argv[1]
    channels = [
        grpc.insecure_channel(f"unix:{run_dir}/{service}.sock", options=CHANNEL_OPTIONS)
        for service in ("containerizer", "switchboard")
    ]
    calls = Calls(*channels)
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line:
        return
    operation, name, command, spec = json.loads(line)
    match operation:
        case "launch":
            for _ in calls.launch(command, name, spec).call:
                pass
        case "exec":
            for _ in calls.launch(command, name, spec, exec=True).call:
                pass
        case "create":
            calls.create(name, spec)
        case "destroy":
            calls.destroy(name)
        case "update":
            calls.containerizer.Update(cpb.UpdateRequest(name=name, mode=cpb.UpdateRequest.REPLACE))
        case "pause":
            calls.containerizer.Pause(cpb.PauseRequest(name=name))


if __name__ == "__main__":
    main()
