// Launches a command, reads its output, cancels it, and looks whether anything is left of it.
//
//   node launch.js [RUN_DIR]      (default: TIGHTSHIP_RUN_DIR, else /run/tightship)

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import process from "node:process";
import grpc from "@grpc/grpc-js";
import { call, connect, details, messages } from "./tightship.js";

const runDir = process.argv[2] ?? process.env.TIGHTSHIP_RUN_DIR ?? "/run/tightship";
const { containerizer, switchboard } = connect(runDir);

/** One that runs to its end: its output, and how it ended. */
async function run(request) {
  const launch = containerizer.Launch({ request_id: randomUUID(), ...request });
  let output = Buffer.alloc(0);
  let record;
  for await (const { event, started, exited, gone } of messages(launch)) {
    if (event === "started") {
      // With `follow` it ends with the command, not before.
      const attached = switchboard.AttachOutput({ lease_id: started.lease_id, follow: true });
      for await (const { data } of messages(attached)) if (data) output = Buffer.concat([output, data.data]);
    } else if (event === "exited") record = exited.record;
    else console.log(`cleanup: ${gone.cleanup.outcome}, ${gone.cleanup.cgroups_removed} cgroups removed`);
  }
  return { output: output.toString(), record };
}

/** One that would run for ten minutes, cancelled when it has said its first words. */
async function cancelled(request) {
  const launch = containerizer.Launch({ request_id: randomUUID(), ...request });
  for await (const { started } of messages(launch)) {
    if (!started) continue;
    const attached = switchboard.AttachOutput({ lease_id: started.lease_id, follow: true });
    for await (const { data } of messages(attached)) {
      if (!data) continue;
      console.log(`${started.name} says: ${data.data.toString().trim()}`);
      attached.cancel();
      launch.cancel(); // the end of the call is the end of the container
    }
    return started;
  }
}

/** The container's record, when nothing of it is left. */
async function ended(id) {
  for (;;) {
    const { container } = await call(containerizer, "Get", { name: id });
    if (container.state === "ENDED") return container.record;
    assert.notEqual(container.state, "CLEANUP_PENDING", container.pending_reason);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

try {
  const spec = { text: "memory { limit: 67108864 } tasks { limit: 20 }" };
  const done = await run({ command: ["sh", "-c", "echo hello from Node; exit 3"], spec });
  console.log(`exit status ${done.record.exit_code}, output: ${done.output.trim()}`);
  assert.equal(done.output, "hello from Node\n");
  assert.equal(done.record.exit_code, 3);

  const started = await cancelled({ command: ["sh", "-c", "echo working; sleep 600"], spec });
  const record = await ended(started.id);
  console.log(`${record.name}: ${record.reason} (${record.cancel_reason})`);
  assert.equal(record.reason, "CANCELLED");

  const { containers } = await call(containerizer, "List", { recursive: true });
  assert.equal(containers.find(({ id }) => id === started.id), undefined);
  const { findings } = await call(containerizer, "Audit", {});
  console.log(`audit: ${findings.length} left`);
  assert.deepEqual(findings, []);

  // Errors are a code, a message for people, and details for programs.
  await assert.rejects(run({ command: ["true"], spec: { text: "memory { limit: lots }" } }), (error) => {
    const { reason, metadata } = details(error);
    console.log(`${grpc.status[error.code]} ${reason}: ${error.details} (field ${metadata.field})`);
    return error.code === grpc.status.INVALID_ARGUMENT && metadata.field === "memory.limit";
  });
} finally {
  containerizer.close();
  switchboard.close();
}
