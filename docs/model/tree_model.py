#!/usr/bin/env python3
"""Exhaustive small models of trees: every order of steps on every small graph of discoveries. See README.md and
docs/adr/0068-trees.md. No dependencies.

  python3 tree_model.py             all scenarios (about half a minute)
  python3 tree_model.py NAME ...    only those whose name contains NAME
Each scenario says what is expected (holds / breaks); exit 1 when one does not come out as expected. A scenario that
breaks leaves a rule out, and prints the shortest history that shows why the rule is there.

The keys 0 to n-1 are tasks of one tree, and 0 is the root. A graph says which keys each task discovers, all of them
later ones; a key that two tasks discover is a duplicate for the second. One step is one transaction: tasks, tree and
the task of an end change together. The steps are completions, deaths, cancels, repeated and surplus reports, letters of
discovered tasks, tasks and letters that are sent again, purges, an insert that joins the tree, and the cancel of the
whole tree.

In each state:
  - the tree is open exactly while a task of it is unfinished, or dead and holds it (not while it is cancelled);
  - it has ended once in each epoch but a last one that is open, with one `then` task each time;
  - it has failed exactly if something is dead, cancelled or a letter, and that counts;
  - after the cancel of a tree nothing of it is unfinished, unless something is sent again.
"""
import itertools
import sys
import time

from queue_model import explore, trace

HOLDS, BREAKS = "holds", "breaks"
# A task: not there, unfinished, completed, dead, cancelled, purged.
NONE, UNFINISHED, COMPLETED, DEAD, CANCELLED, PURGED = "-UCDXP"
OPEN, DONE, FAILED = "ODF"


# ------------------------------------------------------------------ the graphs
def graphs(n):
    """All graphs of n keys in which each key but the root is discovered by at least one earlier key."""
    parents = []
    for key in range(1, n):
        earlier = range(key)
        parents.append([
            chosen for size in range(1, key + 1) for chosen in itertools.combinations(earlier, size)
        ])
    for choice in itertools.product(*parents):
        children = [[] for _ in range(n)]
        for key, of in enumerate(choice, start=1):
            for parent in of:
                children[parent].append(key)
        yield tuple(tuple(keys) for keys in children)


# ------------------------------------------------------------------ the tree
# state: (tasks, letters, tree, thens, late, cancel, extra, faults)
#  tasks    a status for each key, and a last one for the task that an insert brings
#  letters  what became letters, in order: (task that discovered it, key)
#  tree     (open, held, dead, cancelled, letters, state, epoch)
#  thens    how many `then` tasks each epoch has
#  late     what surplus reports brought, outside of the tree
#  cancel   None; or what the walk of the cancel has still to look at, as a tuple of keys
#  extra    changes of tasks that the tree has not heard of (only if counting is a step of its own)
#  faults   how many faults may still happen
class Tree:
    def __init__(self, children, on_dead="count", faults=3, without=()):
        self.children = children
        self.n = len(children)
        self.on_dead = on_dead
        self.faults = faults
        self.without = set(without)

    def rule(self, name):
        return name not in self.without

    def initial(self):
        tasks = [NONE] * (self.n + 1)
        tasks[0] = UNFINISHED
        return (tuple(tasks), (), (1, 0, 0, 0, 0, OPEN, 0), (), 0, None, (), self.faults)

    # -------------------------------------------------------------- one transaction
    def change(self, state, moves=(), letters=0, back=False, purged=0, fault=0, late=0, cancel=False, tasks=None,
               lettered=None):
        """The state after a transaction that makes these moves: (key, to)."""
        old, old_letters, tree, thens, was_late, was_cancel, extra, faults = state
        new = list(old)
        delta = {UNFINISHED: 0, DEAD: 0, CANCELLED: 0}
        for key, to in moves:
            if new[key] in delta:
                delta[new[key]] -= 1
            if to in delta:
                delta[to] += 1
            new[key] = to
        # A purged task is no more dead by its status, and stays so in the count.
        delta[DEAD] += purged
        heard = (delta[UNFINISHED], delta[DEAD], delta[CANCELLED], letters, purged, back)
        state = (
            tuple(new), old_letters if lettered is None else lettered, tree, thens, was_late + late,
            was_cancel if cancel is False else cancel, extra, faults - fault,
        )
        if self.rule("one transaction"):
            return self.heard(state, heard)
        # Counting is a step of its own, which a crash may lose.
        return state[:6] + (extra + (heard,), state[7])

    def heard(self, state, heard):
        """The tree hears of the changes of a transaction."""
        tasks, letters, tree, thens, late, cancel, extra, faults = state
        open_, held, dead, cancelled, of_letters, status, epoch = tree
        d_open, d_dead, d_cancelled, d_letters, purged, back = heard
        open_ += d_open
        dead += d_dead
        cancelled += d_cancelled
        of_letters += d_letters
        if self.on_dead == "hold":
            held += d_dead - purged
        if status != OPEN and (back or d_open > 0) and self.rule("back"):
            status = OPEN
            epoch += 1
        if back:
            cancel = None
        is_held = held > 0 and cancel is None and self.rule("hold")
        if status == OPEN and open_ == 0 and not is_held:
            failed = dead > 0 or cancelled > 0 or of_letters > 0
            status = FAILED if failed and self.on_dead != "ignore" else DONE
            thens = thens + (0,) * (epoch + 1 - len(thens))
            thens = thens[:epoch] + (thens[epoch] + 1,) + thens[epoch + 1:]
        tree = (open_, held, dead, cancelled, of_letters, status, epoch)
        return (tasks, letters, tree, thens, late, cancel, extra, faults)

    # -------------------------------------------------------------- the steps
    def discoveries(self, state, key, drop_letters=True):
        """The moves of what a task discovers: keys that nobody has yet, and that are no letters of this report."""
        tasks, letters, _, _, _, cancel, _, _ = state
        if cancel is not None and self.rule("mark"):
            return []
        keys = [child for child in self.children[key] if tasks[child] == NONE]
        if drop_letters:
            keys = [child for child in keys if (key, child) not in letters]
        return [(child, UNFINISHED) for child in keys]

    def actions(self, state):
        tasks, letters, tree, thens, late, cancel, extra, faults = state
        out = []

        def add(label, following):
            out.append((label, following, 0))

        if extra:
            add("count", self.heard(state[:6] + (extra[1:], faults), extra[0]))
            if faults:
                add("crash before counting", state[:6] + (extra[1:], faults - 1))
        for key in range(self.n + 1):
            status = tasks[key]
            of_graph = key < self.n
            if status == UNFINISHED:
                found = self.discoveries(state, key) if of_graph else []
                if self.rule("sum") or not found:
                    add(f"{key} completes", self.change(state, [(key, COMPLETED)] + found))
                else:
                    # The end is counted before what it discovered.
                    ended = self.change(state, [(key, COMPLETED)])
                    add(f"{key} completes", self.change(ended, found))
                if faults:
                    add(f"{key} dies", self.change(state, [(key, DEAD)], fault=1))
                    add(f"{key} is cancelled", self.change(state, [(key, CANCELLED)], fault=1))
                    # A discovered key finds no room, before the report is settled.
                    for child, _ in (found if cancel is None else []):
                        counts = 1 if self.rule("letters") else 0
                        add(
                            f"{child} becomes a letter",
                            self.change(state, letters=counts, fault=1, lettered=letters + ((key, child),)),
                        )
            if status == COMPLETED and of_graph and faults:
                # The same report again: its discoveries are dropped with it.
                if self.rule("repeated"):
                    add(f"{key} is repeated", self.change(state, fault=1))
                else:
                    again = list(self.change(state, fault=1))
                    grown = len(self.children[key])
                    open_, *rest = again[2]
                    again[2] = (open_ + grown - 1, *rest)
                    add(f"{key} is repeated", tuple(again))
            if status in (COMPLETED, DEAD, CANCELLED) and of_graph and faults and late == 0:
                # The second worker of a lost lease: what it discovered is stored outside of the tree.
                if self.rule("surplus"):
                    add(f"{key} is reported late", self.change(state, fault=1, late=1))
                else:
                    # Its discoveries count in the tree, although only the first worker's were stored.
                    again = list(self.change(state, fault=1, late=1))
                    open_, *rest = again[2]
                    again[2] = (open_ + len(self.children[key]), *rest)
                    add(f"{key} is reported late", tuple(again))
            if status in (DEAD, CANCELLED) and faults:
                back = self.rule("back")
                add(f"{key} is sent again", self.change(state, [(key, UNFINISHED)], back=back, fault=1))
            if status == DEAD and faults:
                add(f"{key} is purged", self.change(state, [(key, PURGED)], purged=1, fault=1))
        for letter in letters:
            if faults:
                child = letter[1]
                rest = [other for other in letters if other != letter]
                if tasks[child] == NONE:
                    add(
                        f"letter {child} is sent again",
                        self.change(state, [(child, UNFINISHED)], letters=-1, back=True, fault=1, lettered=tuple(rest)),
                    )
                else:
                    # A duplicate: its letter goes all the same.
                    gone = {"letters": -1, "back": True} if self.rule("duplicate letters") else {}
                    add(
                        f"letter {child} is a duplicate",
                        self.change(state, fault=1, lettered=tuple(rest), **gone),
                    )
        if tasks[self.n] == NONE and tree[5] == OPEN and cancel is None and faults:
            add("an insert joins", self.change(state, [(self.n, UNFINISHED)], fault=1))
        if cancel is None and tree[5] == OPEN and faults:
            known = tuple(key for key in reversed(range(self.n + 1)) if tasks[key] != NONE)
            add("the tree is cancelled", self.change(state, fault=1, cancel=known))
        if cancel:
            key, rest = cancel[0], cancel[1:]
            moves = [(key, CANCELLED)] if tasks[key] == UNFINISHED else []
            add(f"the walk passes {key}", self.change(state, moves, cancel=rest))
        return out

    # -------------------------------------------------------------- what must hold
    def invariant(self, state):
        tasks, letters, tree, thens, late, cancel, extra, faults = state
        open_, held, dead, cancelled, of_letters, status, epoch = tree
        unfinished = sum(task == UNFINISHED for task in tasks)
        holds = sum(task == DEAD for task in tasks) if self.on_dead == "hold" else 0
        if extra:
            return None
        # Under the cancel no dead task holds the tree.
        holding = holds if cancel is None else 0
        if status == OPEN and unfinished + holding == 0:
            return "OPEN, and nothing keeps it open"
        if status != OPEN and unfinished + holding > 0:
            return "ended, and something is unfinished"
        if open_ != unfinished or (held != holds and self.rule("hold")):
            return f"counts {open_} open and {held} held: there are {unfinished} and {holds}"
        if epoch > 0 and faults == self.faults:
            return "ended before the end"
        ended = epoch + (status != OPEN)
        if sum(thens) != ended or any(count > 1 for count in thens):
            return f"{ended} ends, and then tasks {thens}"
        # A dead task may have been purged, which the tree remembers.
        bad = any(task in (DEAD, CANCELLED, PURGED) for task in tasks) or bool(letters)
        if status != OPEN and self.on_dead == "ignore" and status != DONE:
            return "FAILED, and nothing counts"
        if status != OPEN and self.on_dead != "ignore" and (status == FAILED) != bad:
            return f"{status}, and something is dead, cancelled or a letter: {bad}"
        if cancel == () and unfinished:
            return "cancelled, and something is unfinished"
        return None


# ------------------------------------------------------------------ scenarios
def all_of(sizes, **settings):
    return [Tree(children, **settings) for n in sizes for children in graphs(n)]


SCENARIOS = [
    ("count: all graphs of up to 5 tasks, two faults", HOLDS, lambda: all_of((1, 2, 3, 4, 5), faults=2)),
    ("count: all graphs of up to 4 tasks, three faults", HOLDS, lambda: all_of((1, 2, 3, 4), faults=3)),
    ("count: all graphs of up to 3 tasks, five faults", HOLDS, lambda: all_of((1, 2, 3), faults=5)),
    ("ignore: all graphs of up to 4 tasks, three faults", HOLDS,
     lambda: all_of((1, 2, 3, 4), on_dead="ignore", faults=3)),
    ("hold: all graphs of up to 4 tasks, three faults", HOLDS,
     lambda: all_of((1, 2, 3, 4), on_dead="hold", faults=3)),
    ("hold: all graphs of up to 3 tasks, five faults", HOLDS, lambda: all_of((1, 2, 3), on_dead="hold", faults=5)),
    ("counting is a second transaction", BREAKS, lambda: all_of((2,), faults=1, without=["one transaction"])),
    ("an end is counted before its discoveries", BREAKS, lambda: all_of((2,), faults=0, without=["sum"])),
    ("a repeated report counts", BREAKS, lambda: all_of((2,), faults=1, without=["repeated"])),
    ("a surplus report counts", BREAKS, lambda: all_of((2,), faults=1, without=["surplus"])),
    ("letters do not count", BREAKS, lambda: all_of((2,), faults=1, without=["letters"])),
    ("a letter that is a duplicate stays in the count", BREAKS,
     lambda: all_of((3,), faults=2, without=["duplicate letters"])),
    ("an ended tree does not open again", BREAKS, lambda: all_of((1,), faults=2, without=["back"])),
    ("a dead task does not hold", BREAKS, lambda: all_of((1,), on_dead="hold", faults=1, without=["hold"])),
    ("a cancel does not mark the tree", BREAKS, lambda: all_of((3,), faults=1, without=["mark"])),
]


def check(tree):
    parent, _, bad = explore(tree.initial(), tree.actions, tree.invariant)
    return parent, bad


def main():
    wrong = 0
    for name, expect, make in SCENARIOS:
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        began = time.time()
        states = 0
        found = None
        for tree in make():
            parent, bad = check(tree)
            states += len(parent)
            if bad:
                found = (tree, parent, bad)
                break
        got = BREAKS if found else HOLDS
        ok = got == expect and not (found and found[2][0] == "STATE LIMIT")
        wrong += not ok
        verdict = "ok" if ok else "NOT SO"
        print("%-8s %-52s %-7s %8d states %5.1fs" % (verdict, name, got, states, time.time() - began), flush=True)
        if found:
            tree, parent, bad = found
            print("    ", bad[0])
            print("      graph", tree.children, ":", " > ".join(trace(parent, bad[1])))
            if not ok:
                print("      state", bad[1])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
