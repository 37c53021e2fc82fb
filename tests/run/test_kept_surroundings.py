"""What is read out of a launcher's variables, and what is said of those that are not enough: kept beside this test."""

from __future__ import annotations

from kept_figures import assert_kept, told

from paceline.run.links import BlockedLink, explain, left_out, partners_of
from paceline.run.whereami import Surroundings, _parse_counts, is_loopback, parse_nodes, recognise, tasks_of_node

MASTER = {"MASTER_ADDR": "host1", "MASTER_PORT": "29501"}
RANK = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MASTER}
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0"}
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"))}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "417",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
}
TASKS = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "nothing": {},
    "switch": {"PACELINE_LAUNCHER": "none", **RANK},
    "wrong switch": {"PACELINE_LAUNCHER": "some"},
    "torchrun": {**RANK, "TORCHELASTIC_RUN_ID": "x"},
    "ray": {**RANK, "RAY_JOB_ID": "1"},
    "plain rank": RANK,
    "last rank": {**RANK, "RANK": "3"},
    "rank too high": {**RANK, "RANK": "4"},
    "local rank too high": {**RANK, "LOCAL_RANK": "2"},
    "local rank alone": {name: value for name, value in RANK.items() if name != "LOCAL_WORLD_SIZE"},
    "no ranks": {**RANK, "WORLD_SIZE": "0"},
    "no local ranks": {**RANK, "LOCAL_WORLD_SIZE": "0"},
    "port 0": {**RANK, "MASTER_PORT": "0"},
    "port 65535": {**RANK, "MASTER_PORT": "65535"},
    "port 65536": {**RANK, "MASTER_PORT": "65536"},
    "socket": {**RANK, "MASTER_ADDR": "unix:/tmp/s", "MASTER_PORT": "0"},
    "tcp": {**RANK, "MASTER_ADDR": "tcp:host1", "MASTER_PORT": "0"},
    "no address": {"RANK": "0", "WORLD_SIZE": "2"},
    "kubeflow": PET,
    "kubeflow by its count": {"PET_NNODES": "1"},
    "kubeflow by its number": {"PET_NODE_RANK": "0"},
    "kubeflow alone with ranks": {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"},
    "kubeflow alone with ranks and address": {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "h"},
    "kubeflow elastic": {"PET_NNODES": "2:4", "PET_NODE_RANK": "3", "PET_RDZV_ENDPOINT": "job-0:1234"},
    "kubeflow endpoint": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "job-0"},
    "kubeflow both": {**PET, "PET_RDZV_ENDPOINT": "other:1", "PET_MASTER_PORT": "1234"},
    "kubeflow gpu": {**PET, "PET_NPROC_PER_NODE": "gpu"},
    "kubeflow wrong ranks": {**PET, "PET_NPROC_PER_NODE": "0"},
    "kubeflow number too high": {**PET, "PET_NODE_RANK": "2"},
    "kubeflow no address": {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
    "node rank": {"NODE_RANK": "1", "NNODES": "2", "LOCAL_WORLD_SIZE": "3", **MASTER},
    "node rank alone": {"NNODES": "1", "NODE_RANK": "0"},
    "node rank by ranks": {"NODE_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
    "node rank of how many": {"NODE_RANK": "1", **MASTER},
    "node rank wrong count": {"NODE_RANK": "0", "NNODES": "none", **MASTER},
    "node rank too high alone": {"NODE_RANK": "1", "NNODES": "1", **MASTER},
    "kubernetes": {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", **MASTER},
    "mpi": {**MPI, **MASTER},
    "mpi on one host": {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job7"},
    "mpi on one host with address": {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **MASTER},
    "mpi without address": MPI,
    "mpi alone": {**MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "hydra": {**PMI, **MASTER},
    "hydra without port": {**PMI, "MASTER_ADDR": "host1"},
    "pmix": {"PMIX_RANK": "1", "WORLD_SIZE": "2", **MASTER},
    "slurm": SLURM,
    "slurm with address": {**SLURM, **MASTER},
    "slurm tasks": {**SLURM, **TASKS},
    "slurm one task": {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "slurm task too high": {**SLURM, "SLURM_PROCID": "4"},
    "slurm without nodes": {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},
    "slurm shell": {"SLURM_JOB_ID": "417", "SLURM_STEP_ID": "4294967290", "SLURM_JOB_NUM_NODES": "1"},
    "slurm shell of two nodes": {"SLURM_JOB_ID": "417", "SLURM_STEP_ID": "4294967290", "SLURM_JOB_NUM_NODES": "2"},
    "slurm batch": {"SLURM_JOB_ID": "417", "SLURM_JOB_NUM_NODES": "2"},
    "slurm in ray": {**SLURM, "RAY_JOB_ID": "1"},
    "address elsewhere": {"MASTER_ADDR": "host1"},
    "address here": {"MASTER_ADDR": "::1", "WORLD_SIZE": "1", "NNODES": "1"},
    "several ranks": {"WORLD_SIZE": "2"},
    "several hosts": {"NNODES": "2", "MASTER_ADDR": "localhost"},
}
BLOCKED = [
    BlockedLink((0, 2), "a", "c", "10.0.0.3", [40000, 50000], "no answer within 5 s", (32768, 60999)),
    BlockedLink((2, 0), "c", "a", "10.0.0.1", [41000], "connection refused", (32000, 61000)),
    BlockedLink((2, 1), "c", "b", "10.0.0.2", [42000], "no answer within 5 s", (32768, 60999)),
]


def nodes(counts: str, endpoint: str, ranks: int | None = None) -> object:
    return told(lambda: parse_nodes(counts, endpoint, ranks))


def described(environment: dict[str, str]) -> object:
    def read() -> dict[str, object]:
        found = recognise(environment)
        return {"is": found, "says": str(found), "sets": found.rank_variables()}

    return told(read)


def figures() -> dict[str, object]:
    found: dict[str, object] = {f"environment, {name}": described(each) for name, each in ENVIRONMENTS.items()}
    endpoints = ("host:29400", "[::1]:29400", "host:0", "host:65535", "host:65536", "host", ":1", "a b:1")
    found["--rdzv"] = {each: nodes("1:4", each) for each in endpoints}
    found["--nnodes"] = {each: nodes(each, "host:1", 3) for each in ("2", "2:2", "3:2", "0", "0:2", "1:", "x")}
    found["counts"] = {each: list(_parse_counts(each) or ()) for each in ("1", "2:4", "4:2", "0:1", "1234567", "2:")}
    texts = ("2(x3),1", "4", " 4 , 5(x1)", "2(x65536)", "2(x65537)", "2x3", "")
    found["tasks"] = {text: [str(tasks_of_node(text, node)) for node in (0, 1, 2, 3, 4)] for text in texts}
    addresses = ("127.0.0.1", "127.3.2.1", "::1", "10.0.0.1", "localhost", "host1", "")
    found["loopback"] = {each: is_loopback(each) for each in addresses}
    found["blocked links"] = explain(BLOCKED)
    found["many blocked links"] = [explain(BLOCKED[:1] * number) for number in (12, 13)]
    found["left out"] = {
        f"{size} of {least}": told(lambda size=size, least=least: left_out(BLOCKED, size, least))  # type: ignore[misc]
        for size, least in ((3, 1), (3, 2), (3, 3))
    }
    found["left out of a pair"] = {str(place): name for place, name in (left_out(BLOCKED[1:2], 3, 2) or {}).items()}
    found["partners"] = {
        f"{place} of {size}": {str(each): str(ports) for each, ports in partners_of(place, size, seed).items()}
        for place, size, seed in ((0, 1, 1), (1, 3, 1), (31, 32, 1), (0, 33, 1), (32, 33, 1), (5, 40, 2), (5, 40, 3))
    }
    found["alone"] = str(Surroundings(launcher="no launcher"))
    return found


def test_surroundings_are_read_as_they_were() -> None:
    assert_kept(__file__, figures())
