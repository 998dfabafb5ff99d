"""What a client finds that has no protos of ours: reflection, and health by service, on both services."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tests.harness.pair import Pair

Service = Literal["containerizer", "switchboard"]
NAMES: dict[Service, str] = {
    "containerizer": "tightship.v1.ContainerizerService",
    "switchboard": "tightship.v1.SwitchboardService",
}


@pytest.fixture(params=["v1", "v1alpha"])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def _ask(channel: grpc.Channel, version: str, **question: Any) -> reflection_pb2.ServerReflectionResponse:
    method: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = method(iter([reflection_pb2.ServerReflectionRequest(**question)]), timeout=20)
    assert isinstance(answer, reflection_pb2.ServerReflectionResponse)
    return answer


@pytest.mark.parametrize("service", NAMES)
def test_services_are_found(pair: Pair, service: Service, version: str) -> None:
    listed = _ask(pair.channel(service), version, list_services="").list_services_response.service
    assert {each.name for each in listed} == {NAMES[service], "grpc.health.v1.Health"}


def test_a_call_by_descriptors_alone(pair: Pair, version: str) -> None:
    channel = pair.channel("containerizer")
    answer = _ask(channel, version, file_containing_symbol=NAMES["containerizer"])
    pool = descriptor_pool.DescriptorPool()
    files = {}
    for data in answer.file_descriptor_response.file_descriptor_proto:
        file = descriptor_pb2.FileDescriptorProto.FromString(data)
        files[file.name] = file

    def add(name: str) -> None:
        for dependency in files[name].dependency:
            if dependency in files:
                add(dependency)
        if name in files:
            pool.Add(files.pop(name))

    add("tightship/v1/containerizer.proto")
    method = pool.FindServiceByName(NAMES["containerizer"]).methods_by_name["Launch"]
    request, response = (message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type))
    launch: Any = channel.unary_stream(
        f"/{NAMES['containerizer']}/Launch",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    events = list(launch(request(command=["sh", "-c", "exit 3"]), timeout=30))
    assert [each.WhichOneof("event") for each in events] == ["started", "exited", "gone"]
    assert events[1].exited.record.exit_code == 3


def test_what_is_not_there(pair: Pair, version: str) -> None:
    answer = _ask(pair.channel("switchboard"), version, file_containing_symbol="tightship.v1.Nothing")
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.parametrize("service", NAMES)
def test_health_by_service(pair: Pair, service: Service) -> None:
    stub: Any = health_pb2_grpc.HealthStub(pair.channel(service))
    for name in ("", NAMES[service]):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="tightship.v1.Nothing"), timeout=20)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
