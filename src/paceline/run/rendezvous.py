"""How launchers meet, as torch's agents ask for it: through the control server of one of them.

On one host the server is the launcher's own, on a unix socket that only its user reaches. With several hosts it listens
at the address that the user named, on the host that has it, and every connection proves the job's secret. torch's own
rendezvous listens at all addresses, asks nobody who he is, and unpickles what it is sent.

A round of hosts is one attempt at a run: an agent joins once. Where hosts come or go, the attempt is over, and the
first account of how it ended counts for all (``agree_on_end``). A launcher that cannot reach the server ends its ranks,
and tries to come back for ``_RETURN_S``. Before a rank is started, hosts compare what they bring (``agreement.py``),
and in each round find out whether they reach one another (``links.py``): one that others do not reach is left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic import rendezvous as elastic

from paceline.comm.control.server import Attendance, ControlServer, Hosts, private_server
from paceline.comm.control.store import ControlClient, ControlStore, SideChannel
from paceline.comm.control.wire import CUT_S, SECRET_FILE, Address, RefusedError, Secret, listen, read_secret, secret_of
from paceline.errors import CommunicationError, LaunchError, UsageError
from paceline.health.exit_codes import FAILED, REFUSED
from paceline.run.agreement import REFUSED_WHY, HostFacts, agree, refusal_of
from paceline.run.links import check_links, data_addresses, explain, left_out
from paceline.run.logs import say
from paceline.run.signals import start_thread
from paceline.run.whereami import LAST_CALL_S, Surroundings, host_name

BACKEND = "paceline"
CHANGED = "hosts: "  # begins an account of hosts that came or went, which no rank is to blame for
_SERVER_S = 60.0  # for the launcher that has the server to start
_JOIN_S, _WAIT_S = 600.0, 10.0  # for a round to begin; until a launcher says again that it waits
_RETURN_S = 30.0  # for a server that cannot be reached any more to answer again
_BEAT_S, _BEATS_PER_S = 0.5, 500  # of a launcher; and of all of them, which one server hears
_MISSED = 4  # beats, before a launcher that beats slowly is missed
_BETTER_S = 5.0  # for a host that knows more to tell it; one that is silent is missed sooner
_READ_S = 5.0  # for other hosts to read why the run is refused
_QUIET_S = 5.0  # of waiting, before it is told
# The address is another host's, or another launcher on this one has it already.
_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


@contextlib.contextmanager
def rendezvous(
    folder: Path, run_id: str, nodes: Surroundings | None, facts: HostFacts | None = None
) -> Iterator[Rendezvous]:
    """Has the launchers meet, in ``folder`` where there is but one. Raises UsageError where hosts do not agree."""
    with contextlib.ExitStack() as stack:
        if nodes is None:
            address, secret_file = stack.enter_context(private_server(folder))
            stack.enter_context(made := Rendezvous(address, lambda: read_secret(secret_file), run_id))
            made.variables = {SECRET_FILE: str(secret_file)}
            yield made
            return
        own = f"{host_name()}/{os.getpid()}/{secrets.token_hex(4)}"
        address, secret = Address(nodes.address, nodes.port), lambda: secret_of(os.environ)
        hosts = Hosts(least=nodes.least, most=nodes.count, last_call_s=LAST_CALL_S)
        hosts.silence_s = max(hosts.silence_s, _MISSED * _beat_s(nodes.count))
        try:
            listener = listen(address)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
        else:
            _allow_files()  # each host has several connections, and so has each rank
            stack.enter_context(ControlServer([listener], secret, hosts, own))
        stack.enter_context(made := Rendezvous(address, secret, run_id, attends_as=own))
        made.hosts = hosts
        made.addresses = data_addresses(nodes.own_address())
        if facts is not None:
            made.agree(facts, may_go_without=nodes.least < nodes.count)
        yield made


def _made_before(parameters: elastic.RendezvousParameters) -> elastic.RendezvousHandler:
    made: Rendezvous = parameters.config["made"]
    made.has_joined = False  # a new agent's
    return made


elastic.rendezvous_handler_registry.register(BACKEND, _made_before)


class HostsChangedError(Exception):
    """The hosts of a round are no longer those that take part: the attempt is over, and nobody is to blame."""


class LeftOutError(LaunchError):
    """This host cannot take part any more; the others go on without it where they are enough."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class Rendezvous(elastic.RendezvousHandler):
    """This launcher's part in the meetings of all. ``attends_as``: its name among several, who must know it lives."""

    def __init__(self, address: Address, secret: Secret, run_id: str, attends_as: str = "") -> None:
        self._secret = secret
        self._client = ControlClient(address, secret)
        self._beats = ControlClient(address, secret)  # whose one connection ends with this launcher
        self._run_id = run_id
        self._name = attends_as or "alone"
        self._round = 0
        self._seen = Attendance()
        self._problem: Exception | None = None
        self._is_over = threading.Event()
        self._thread = self._attendant() if attends_as else None
        self._store = ControlStore(self._client)
        self._stores: list[ControlStore] = []  # of agents, see ControlStore
        self.variables: dict[str, str] = {}  # that ranks are told
        self.has_joined, self.size = False, 1  # hosts of the round
        self.on_join: Callable[[int, int], None] = lambda _place, _size: None  # before ranks are started
        self.on_look: Callable[[], None] = lambda: None  # while an agent's ranks run
        self.hosts = Hosts()  # those of the server, where this launcher has it
        self.addresses: list[str] = []  # at which ranks will listen; none: the links are not checked

    def __enter__(self) -> Rendezvous:
        with self._told_if_long("for the launcher there"):
            try:
                self._client.wait_for_server(_SERVER_S)
            except CommunicationError as error:
                raise elastic.RendezvousConnectionError(f"{error}{self._hint()}") from error
        if self._thread is not None:
            start_thread(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_BEAT_S)  # it may wait for a server that does not answer any more
        self._client.close()

    def agree(self, facts: HostFacts, *, may_go_without: bool) -> None:
        try:
            _explained(agree, self._store, facts, may_go_without=may_go_without)
        except UsageError:
            if not may_go_without:
                self.set_closed()
            raise

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Joins the next round, once for each agent: HostsChangedError ends one that would join another."""
        if self.has_joined:
            raise HostsChangedError
        with self._told_if_long(f"for other hosts: at least {self.hosts.least} are needed"):
            found = _explained(self._join)
        if not found:
            self._raise_refusal()
            raise elastic.RendezvousClosedError("the run has ended on another host")
        self._round, rank, self.size = found
        self.has_joined = True
        if self.addresses and self.size > 1:
            self._check_links(rank)
        self.on_join(rank, self.size)
        self._stores.append(store := ControlStore(self._client, f"agents/{self._round}/", self._look_around))
        place = elastic.RendezvousStoreInfo(str(self._client.address), self._round)
        return elastic.RendezvousInfo(store, rank, self.size, place)

    def _join(self) -> Any:
        """Waits for the next round, and says so again and again: a network that is down for seconds ends what waits."""
        deadline = time.monotonic() + _JOIN_S
        while not self._seen.is_closed:
            if self._problem is not None:
                self._come_back(self._problem)
            try:
                return self._client.ask("join", self._name, _WAIT_S, self._round, within_s=_WAIT_S)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
            except RefusedError:
                raise
            except CommunicationError:
                if self._thread is None:
                    raise
                self._client.close()
                self._is_over.wait(_BEAT_S)  # where the server is gone, the thread that attends finds out
        return []

    def _check_links(self, place: int) -> None:
        """Raises UsageError where hosts that are needed do not reach one another, HostsChangedError to try without.

        LeftOutError ends the launcher that the others go on without; LaunchError, in later rounds, the run.
        """
        store = ControlStore(self._client, prefix=f"links/{self._round}/")
        self._stores.append(store)
        try:
            blocked = check_links(store, self._secret, self.addresses, place=place, size=self.size, seed=self._round)
        except (CommunicationError, TimeoutError) as error:
            raise HostsChangedError(f"{CHANGED}{error}") from error
        if not blocked:
            return
        deadline = time.monotonic() + self.hosts.silence_s + 2 * _BEAT_S
        while time.monotonic() < deadline and self._problem is None:  # it may be gone, and not missed yet
            if self._news().gone:
                raise HostsChangedError(self._change())
            self._is_over.wait(_BEAT_S / 10)
        told, without = explain(blocked), left_out(blocked, self.size, self.hosts.least)
        if without is None:
            raise UsageError(told) if self._round == 1 else LaunchError(told)
        if place in without:
            raise LeftOutError(f"host {host_name()} is left out of the run\n{told}\n  then start it again", REFUSED)
        raise HostsChangedError(f"{CHANGED}without {', '.join(without.values())}, as {told}\n ")

    def agree_on_end(self, own: str, *, is_sure: bool) -> list[str]:
        """Agrees with the other hosts on how this round ended; returns what ended each round so far, in their order.

        The first account counts, and begins with ``CHANGED`` where hosts came or went. A launcher that is not sure of
        its own waits for a better one, while all hosts are there. Raises CommunicationError where the server is gone,
        and LeftOutError where it cannot be reached for long.
        """
        try:
            if self._problem is not None:
                self._come_back(self._problem)
            return self._settle(own, is_sure=is_sure)
        except (CommunicationError, TimeoutError) as error:
            if self._thread is None:
                raise
            self._come_back(error)
            return self._settle(own, is_sure=is_sure)

    def _settle(self, own: str, *, is_sure: bool) -> list[str]:
        key, deadline = f"ended/{self._round}", time.monotonic() + _BETTER_S
        while not is_sure and time.monotonic() < deadline and not self._store.check([key]):
            self._raise_refusal()
            if self._news().gone:
                own = self._change()
                break
            self._is_over.wait(_BEAT_S / 20)
        self._store.compare_set(key, "", own)
        keys = [f"ended/{number}" for number in range(self._round + 1)]  # 0: before it joined
        return [self._store.get(each).decode() for each in keys if self._store.check([each])]

    def _come_back(self, problem: Exception) -> None:
        """Waits until the server can be reached again. Raises LeftOutError when it cannot."""
        self._client.close()
        self._beats.close()
        try:
            self._client.wait_for_server(_RETURN_S)
        except (CommunicationError, TimeoutError):
            what = f"host {host_name()} has left the run: {problem}; it tried for {_RETURN_S:g} s to come back"
            rule = "all hosts meet at that launcher; the others go on if they reach it and are enough"
            fix = "mend the network between the hosts, or start that launcher again, and then this one"
            raise LeftOutError(f"{what}\n  {rule}\n  {fix}") from problem
        say(f"host {host_name()} reaches {self._client.address} again, and comes back")
        if self._thread is not None:
            self._thread.join(CUT_S)  # unless the server was well
            self._problem = None
            if not self._thread.is_alive():
                self._thread = self._attendant()
                start_thread(self._thread)

    def exchange(self, what: str, own: str, place: int, size: int) -> list[str]:
        """Tells the hosts of this round a text; returns all texts. Raises HostsChangedError where one leaves before."""
        self._stores.append(store := ControlStore(self._client, f"{what}/{self._round}/", self._look_around))
        try:
            store.set(str(place), own)
            return [store.get(str(each)).decode() for each in range(size)]
        except (CommunicationError, TimeoutError) as error:
            raise HostsChangedError(f"{CHANGED}{error}") from error

    def side_channel(self) -> SideChannel:
        """Returns a way for texts between the hosts of this round."""
        return SideChannel(ControlStore(self._client, prefix=f"watch/{self._round}/"), "")

    def is_told(self) -> bool:
        return self._store.check([f"ended/{self._round}"])

    def _raise_refusal(self) -> None:
        refused = refusal_of(self._store)
        if refused:
            raise UsageError(refused)

    @contextlib.contextmanager
    def _told_if_long(self, what: str) -> Iterator[None]:
        timer = threading.Timer(_QUIET_S, lambda: say(f"waiting at {self._client.address} {what}{self._hint()}"))
        timer.daemon = True
        if self._thread is not None:  # one among several
            start_thread(timer)
        try:
            yield
        finally:
            timer.cancel()

    def _hint(self) -> str:
        """Says what it means that the server cannot be reached, and what to do; nothing where it can be."""
        if not self._client.why_unreached:
            return ""
        port = self._client.address.port
        return (
            f"\n  host {host_name()} does not reach it: {self._client.why_unreached.lower()}\n"
            "  refused: that launcher is not started yet; no answer: that host is down, or a firewall drops what comes "
            f"from here\n  start it there; let its firewall pass: iptables -I INPUT -p tcp --dport {port} -j ACCEPT"
        )

    def end(self, refusal: str = "") -> None:
        """Ends the run on all hosts, and keeps the server until they have read why, or for some seconds."""
        with contextlib.suppress(CommunicationError, TimeoutError):  # then another host has told it
            if refusal:
                self._store.set(REFUSED_WHY, refusal)
        self.set_closed()
        deadline = time.monotonic() + _READ_S
        while len(self.hosts.present) > 1 and time.monotonic() < deadline:
            self._is_over.wait(_BEAT_S / 10)

    def num_nodes_waiting(self) -> int:
        """Returns how many hosts wait for a new round, so that the agent ends its ranks; 1 where this one is over."""
        self.on_look()
        news = self._news()
        if self._problem is not None and not news.is_closed:  # else the others have left as they should
            raise elastic.RendezvousConnectionError(str(self._problem)) from self._problem
        if news.newcomers or news.gone:  # told first: ranks of other hosts must not take it for a wish of theirs
            _explained(self._store.compare_set, f"ended/{self._round}", "", self._change())
        return len(news.newcomers) or bool(news.gone or news.is_told)

    def _look_around(self) -> None:
        """Raises HostsChangedError where a round is over before all of its agents have said what they bring."""
        news = self._news()
        if self._problem is not None or news.gone or news.is_told:
            raise HostsChangedError(self._change() if news.gone else "")

    @property
    def is_cut_off(self) -> bool:
        return self._problem is not None

    def _news(self) -> Attendance:
        """Returns what is known of this round; nothing where the server speaks of another, or the run has ended."""
        seen = self._seen  # which a thread replaces
        is_over = seen.is_closed or seen.round != self._round
        return Attendance(is_closed=seen.is_closed) if is_over else seen

    def _change(self) -> str:
        news = self._news()
        told = [f"{host} is gone" for host in news.gone]
        if len(told) == self.size - 1 > 1 and all("nothing was heard" in each for each in told):
            told = [f"{host_name()} hears of no other host: it is cut off from them, or all are gone"]
        return CHANGED + "; ".join([*told, *(f"{host} has come" for host in news.newcomers)])

    def set_closed(self) -> None:
        with contextlib.suppress(CommunicationError, TimeoutError):  # then it is closed
            self._client.ask("close")

    def shutdown(self) -> bool:
        return True  # an agent has ended, and not the run: see end

    def is_closed(self) -> bool:
        return False  # a launcher learns of it when it joins again

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def _attendant(self) -> threading.Thread:
        return threading.Thread(target=self._attend, name="attendance", daemon=True)

    def _attend(self) -> None:
        """Tells the server that this launcher lives, and learns which hosts have left or wait to be taken in."""
        with contextlib.closing(self._beats):  # by which the server knows that this launcher has left
            while not self._is_over.wait(_beat_s(self.hosts.most)):
                try:
                    asked = self._round
                    news = Attendance(*self._beats.ask("attend", self._name, f"ended/{asked}"))
                    self._seen = news if news.round == asked else news._replace(is_told=False)  # of the round before
                except (CommunicationError, TimeoutError) as error:
                    self._problem = error
                    if not (self._is_over.is_set() or self._seen.is_closed):
                        say(
                            f"host {host_name()} does not reach the launcher where the hosts meet: {error}\n"
                            "  either the network between them is down, or that launcher has ended; its ranks here "
                            f"end, and it tries to come back for {_RETURN_S:g} s"
                        )
                    return


def _beat_s(most: int) -> float:
    return max(_BEAT_S, most / _BEATS_PER_S)


def _allow_files() -> None:
    """Lets this process open as many files as it may ask for: often 1024 is but what it gets without asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))


def _explained(ask: Callable[..., Any], *details: Any, **options: Any) -> Any:
    """Asks the server; what goes wrong is raised as torch's agent expects it."""
    try:
        return ask(*details, **options)
    except (CommunicationError, TimeoutError) as error:
        raise elastic.RendezvousConnectionError(str(error) or "the other hosts did not come") from error
