#!/usr/bin/env python3
"""Exhaustive small models of forks and joins: every order of steps in every small graph of stages. See README.md and
docs/adr/0070-joins.md. No dependencies.

  python3 join_model.py             all scenarios (about a minute)
  python3 join_model.py NAME ...    only those whose name contains NAME
Each scenario says what is expected (holds / breaks); exit 1 when one does not come out as expected. A scenario that
breaks leaves a rule out, and prints the shortest history that shows why the rule is there.

A graph has stages, edges, and joins, each with its fork. The level of a join is the stages on the ways from its fork to
it. When a task of the fork completes and sends something towards the join, it opens a subtree. What reaches the join is
a part. When nothing in the subtree is open any more, its parts become one task of the join. One step is one
transaction. The steps are completions with up to two outputs, deaths, cancels of tasks and of the tree, letters,
purges, inserts into the tree, a raised NUM, and tasks and letters that are sent again, even if their subtree is gone.
Repeated, surplus and late reports change only a count that is not modelled, so there are steps for them only in
scenarios that leave their rule out.

In each state:
  - a subtree is there exactly while one of its tasks is unfinished or holds it, or a subtree within it is there. Which
    tasks it has is found by walking from each task to the one that discovered it, not by reading the rows;
  - a subtree that ended with parts became one task of its join, or one letter, after all of it was over, with exactly
    the parts that credited completions sent before. Without parts, or while the tree is cancelled, it became nothing;
  - the tree is open exactly while one of its tasks is unfinished or holds it, and it ends once in each epoch;
  - a tree that has ended has no subtree and no part left.
"""
import itertools
import sys
import time

from queue_model import explore, trace

HOLDS, BREAKS = "holds", "breaks"
# A task: unfinished, completed, dead, cancelled, purged.
UNFINISHED, COMPLETED, DEAD, CANCELLED, PURGED = "UCDXP"
OPEN, DONE, FAILED = "ODF"
# What belongs to the tree itself, and to no subtree.
TOP = -1


# ------------------------------------------------------------------ the graphs
class Refused(Exception):
    pass


class Graph:
    """Stages 0 to n-1, edges, and the fork of each join. `home` has the innermost join around a stage, or None."""

    def __init__(self, n, edges, forks):
        self.n = n
        self.edges = sorted(edges)
        self.forks = dict(forks)
        self.next = [[to for of, to in self.edges if of == stage] for stage in range(n)]
        self.before = [[of for of, to in self.edges if to == stage] for stage in range(n)]
        self.levels = {join: self.level(fork, join) for join, fork in self.forks.items()}
        self.home = [self.innermost(stage) for stage in range(n)]
        self.chains = [self.chain(stage) for stage in range(n)]
        self.check()

    def level(self, fork, join):
        """The stages on ways from the fork to the join, without both."""
        def reached(first, following):
            seen, todo = set(), list(first)
            while todo:
                stage = todo.pop()
                if stage not in seen and stage not in (fork, join):
                    seen.add(stage)
                    todo += following[stage]
            return seen

        return reached(self.next[fork], self.next) & reached(self.before[join], self.before)

    def innermost(self, stage):
        around = [join for join in self.levels if stage in self.levels[join]]
        return min(around, key=lambda join: len(self.levels[join]), default=None)

    def chain(self, stage):
        """The joins around a stage, innermost first."""
        around = []
        while self.home[stage] is not None and self.home[stage] not in around:
            around.append(self.home[stage])
            stage = self.home[stage]
        return around

    def check(self):
        for join, fork in self.forks.items():
            level = self.levels[join]
            if not level and fork not in self.before[join]:
                raise Refused("no way from the fork to the join")
            for of, to in self.edges:
                if (to in level or to == join) and of not in level and of != fork:
                    raise Refused("an edge into a level past its fork")
            if self.home[fork] != self.home[join]:
                raise Refused("ways that cross")
            for other in self.forks:
                inner = self.levels[other]
                if other != join and level & inner and not (level < inner or inner < level):
                    raise Refused("ways that cross")
                if other != join and self.forks[other] == fork and (level & inner or other in level):
                    raise Refused("an output would enter two levels")


def graphs(n, back=0):
    """All graphs of n stages, one of which is a join: each stage but the first has an edge from an earlier one, and
    `back` edges lead back. Graphs that differ only in the order of their stages come once."""
    earlier = []
    for stage in range(1, n):
        earlier.append([of for size in range(1, stage + 1) for of in itertools.combinations(range(stage), size)])
    loops = [(of, to) for of in range(n) for to in range(of + 1)]
    seen = set()
    for choice in itertools.product(*earlier):
        forward = [(of, to) for to, many in enumerate(choice, start=1) for of in many]
        for backward in itertools.combinations(loops, back):
            edges = forward + list(backward)
            for fork, join in itertools.permutations(range(n), 2):
                if join == 0:
                    continue
                try:
                    graph = Graph(n, edges, {join: fork})
                except Refused:
                    continue
                names = min(
                    (sorted((order[of], order[to]) for of, to in edges), order[fork], order[join])
                    for order in ((0,) + rest for rest in itertools.permutations(range(1, n)))
                )
                names = (tuple(names[0]),) + names[1:]
                if names not in seen:
                    seen.add(names)
                    yield graph


def widest(outside, level):
    """The graph of fork 0, join 1, and this many stages in the level and outside of it, with all edges that `check`
    allows. Every graph with one join, with or without loops, is a part of such a graph that has the same level, so
    what can happen in it can happen here. More stages of a kind add nothing, because the rules only ask for the kind.
    """
    inner = range(2, 2 + level)
    n = 2 + level + outside
    edges = [(of, to) for of in range(n) for to in range(n) if of in inner or of == 0 or (to != 1 and to not in inner)]
    return Graph(n, edges, {1: 0})


# ------------------------------------------------------------------ the tree
# state: (tasks, subtrees, top, letters, cancel, faults, note)
#  tasks     (stage, status, subtree, discovered by); the subtree is a column, the last is only for the oracle
#  subtrees  (fork's task, join, parent, is it there?, open, held, children, parts, parts of the oracle, join's tasks)
#  top       (open, held, failed, state, epoch, ends); failed: dead, cancelled, letters
#  letters   (stage, subtree, discovered by, the subtree whose parts it has or None)
#  cancel    None; or how many tasks the walk of the cancel still has to visit, newest first
#  faults    how many faults may still happen
#  note      what the oracle found wrong during a transaction
class Tree:
    def __init__(self, graph, tasks=4, faults=0, on_dead="count", roots=(0,), batch=False, letter_home="subtree",
                 steps=None, books=True, without=()):
        self.graph = graph
        self.tasks = tasks
        self.faults = faults
        self.on_dead = on_dead
        self.roots = roots
        self.batch = batch
        self.letter_home = letter_home
        self.steps = steps
        # Without it, a wrong count is no mistake by itself, and the history goes on to what follows from it.
        self.books = books
        self.without = set(without)

    def rule(self, name):
        return name not in self.without

    def may(self, step):
        return self.steps is None or step in self.steps

    def initial(self, root=0):
        return (((root, UNFINISHED, TOP, TOP),), (), (1, 0, 0, OPEN, 0, 0), (), None, self.faults, "")

    # -------------------------------------------------------------- what a completion may send
    def outputs(self, state, task, most):
        """All choices of up to `most` outputs: (stage, is it new?). A part is always new."""
        tasks, _, _, _, cancel, _, _ = state
        if cancel is not None and self.rule("mark"):
            return [()]
        graph = self.graph
        stage = tasks[task][0]
        discovered = sum(of not in graph.forks for of, *_ in tasks)
        single = []
        for to in graph.next[stage]:
            if to in graph.forks:
                single.append((to, True))
                continue
            if discovered < self.tasks:
                single.append((to, True))
            # A duplicate counts nowhere, but opens a subtree if a fork sends it.
            if graph.home[to] is not None and graph.forks[graph.home[to]] == stage or not self.rule("duplicates"):
                single.append((to, False))
        choices = [()]
        for size in range(1, most + 1):
            for many in itertools.combinations_with_replacement(single, size):
                if sum(new and to not in graph.forks for to, new in many) + discovered <= self.tasks:
                    choices.append(many)
        return choices

    # -------------------------------------------------------------- the steps
    def actions(self, state):
        tasks, subtrees, top, letters, cancel, faults, note = state
        graph = self.graph
        out = []
        if note:
            return out

        def step(label, what, *arguments, fault=0):
            """Adds the step. If it makes the task of a join, adds another in which that task is too large."""
            if fault > faults:
                return
            change = Change(self, state, fault)
            getattr(change, what)(*arguments)
            out.append((label, change.finish(), 0))
            if change.joined and change.faults and self.may("large"):
                change = Change(self, state, fault + 1, large=True)
                getattr(change, what)(*arguments)
                out.append((label + ", too large a join", change.finish(), 0))

        # Of tasks that differ in nothing only the first one needs to act.
        named = {by for _, _, _, by in tasks} | {by for _, _, by, _ in letters}
        unfinished, alike = [], set()
        for task, row in enumerate(tasks):
            if row[1] == UNFINISHED and (self.batch or task in named or row not in alike):
                unfinished.append(task)
            if task not in named:
                alike.add(row)
        for task in unfinished:
            name = f"{task} (stage {tasks[task][0]})"
            for sent in self.outputs(state, task, 2):
                step(f"{name} completes{said(graph, sent)}", "complete", task, sent)
            if self.may("die"):
                step(f"{name} dies", "end", task, DEAD, fault=1)
            if self.may("cancel"):
                step(f"{name} is cancelled", "end", task, CANCELLED, fault=1)
            if self.may("letter") and cancel is None and faults:
                for to in graph.next[tasks[task][0]]:
                    if to not in graph.forks and sum(of not in graph.forks for of, *_ in tasks) < self.tasks:
                        step(f"{name} has a letter for stage {to}", "letter", task, to, fault=1)
        if self.batch:
            for one, other in itertools.combinations(unfinished, 2):
                for sent in self.outputs(state, one, 1):
                    for sent_too in self.outputs(state, other, 1):
                        step(
                            f"{one}{said(graph, sent)} and {other}{said(graph, sent_too)} complete",
                            "complete_both", one, sent, other, sent_too,
                        )
                if self.may("die"):
                    step(f"{one} completes and {other} dies", "complete_one", one, other, fault=1)
                    step(f"{other} completes and {one} dies", "complete_one", other, one, fault=1)
        for task, (stage, status, _, _) in enumerate(tasks):
            name = f"{task} (stage {stage})"
            if status in (DEAD, CANCELLED) and self.may("back"):
                step(f"{name} is sent again", "back", task, fault=1)
            if status == DEAD and self.may("purge"):
                step(f"{name} is purged", "purge", task, fault=1)
            if status == COMPLETED and not self.rule("repeated"):
                step(f"{name} is repeated", "repeated", task, fault=1)
            if status in (COMPLETED, DEAD, CANCELLED):
                for to in graph.next[stage]:
                    if self.rule("surplus part" if to in graph.forks else "surplus task"):
                        continue
                    step(f"{name} is reported late{said(graph, [(to, True)])}", "surplus", task, to, fault=1)
            is_fork = stage in graph.forks.values()
            if status == COMPLETED and self.may("num") and not (is_fork and self.rule("once")):
                step(f"{name} is opened by a higher NUM", "back", task, fault=1)
            if status == UNFINISHED and self.may("num") and not (is_fork and self.rule("once")):
                for sent in self.outputs(state, task, 1):
                    step(f"{name} completes for one of two{said(graph, sent)}", "send", task, sent, fault=1)
        for place in range(len(letters)):
            if self.may("back"):
                step(f"the letter of stage {letters[place][0]} is sent again", "letter_back", place, fault=1)
        if top[3] == OPEN and cancel is None:
            if self.may("insert") and len(tasks) < self.tasks:
                for stage in range(graph.n):
                    if stage not in graph.forks:
                        step(f"an insert joins at stage {stage}", "add", stage, TOP, TOP, fault=1)
            if self.may("cancel tree"):
                step("the tree is cancelled", "mark", fault=1)
        if cancel:
            step(f"the walk passes {cancel - 1}", "walk")
        return out

    # -------------------------------------------------------------- what must hold
    def holds(self, status):
        return self.on_dead == "hold" and status == DEAD

    def invariant(self, state):
        tasks, subtrees, top, letters, cancel, faults, note = state
        if note:
            return note
        open_, held, failed, status, epoch, ends = top
        unfinished = sum(task[1] == UNFINISHED for task in tasks)
        holding = sum(self.holds(task[1]) for task in tasks)
        if self.books and (open_, held) != (unfinished, holding):
            return f"the tree counts {open_} open and {held} held: there are {unfinished} and {holding}"
        # Under the cancel no dead task holds the tree.
        goes_on = unfinished + (holding if cancel is None else 0) > 0
        if (status == OPEN) != goes_on:
            return "OPEN, and nothing keeps it open" if status == OPEN else "ended, and something is unfinished"
        if ends != epoch + (status != OPEN):
            return f"{ends} ends in epoch {epoch}"
        if epoch > 0 and faults == self.faults:
            return "ended before the end"
        lasting = sum(task[1] in (DEAD, CANCELLED, PURGED) for task in tasks) + len(letters)
        if failed != lasting or (status != OPEN and (status == FAILED) != (failed > 0 and self.on_dead != "ignore")):
            return f"{status}, and counts {failed} as failed: there are {lasting}"
        if cancel == 0 and unfinished:
            return "cancelled, and something is unfinished"
        own = [true_subtree(self.graph, tasks, task) for task in range(len(tasks))]
        for place, (fork, join, up, there, s_open, s_held, children, parts, sent, made) in enumerate(subtrees):
            if not there:
                if parts:
                    return "parts of a subtree that is gone"
                continue
            if status != OPEN:
                return "the tree has ended, and a subtree is there"
            inside = [tasks[task][1] for task in range(len(tasks)) if own[task] == (fork, join)]
            below = sum(other[3] for other in subtrees if own[other[0]] == (fork, join))
            s_unfinished = inside.count(UNFINISHED)
            s_holding = sum(self.holds(status) for status in inside)
            if self.books and (s_open, s_held, children) != (s_unfinished, s_holding, below):
                return (
                    f"the subtree of {fork} counts {s_open} open, {s_held} held, {children} subtrees: "
                    f"there are {s_unfinished}, {s_holding}, {below}"
                )
            if s_unfinished + s_holding + below == 0:
                return f"the subtree of {fork} is there, and nothing keeps it"
            if made:
                return f"the subtree of {fork} is there, and has become a task"
            if parts != sent:
                return f"the subtree of {fork} has parts {parts}: credited completions sent {sent}"
        return None


def said(graph, sent):
    words = [
        "part" if to in graph.forks else f"stage {to}" if new else f"a duplicate in stage {to}" for to, new in sent
    ]
    return " > " + " + ".join(words) if words else ""


def true_subtree(graph, tasks, task):
    """The subtree of a task, (fork's task, join), found by walking back to the fork. None: it belongs to the top."""
    stage, _, _, by = tasks[task]
    return subtree_of(graph, tasks, by, graph.home[stage])


def subtree_of(graph, tasks, by, join):
    if join is None:
        return None
    fork = graph.forks[join]
    while by != TOP:
        if tasks[by][0] == fork:
            return (by, join)
        by = tasks[by][3]
    return None


# ------------------------------------------------------------------ one transaction
class Change:
    def __init__(self, tree, state, faults, large=False):
        self.tree = tree
        self.graph = tree.graph
        self.rule = tree.rule
        tasks, subtrees, top, letters, self.cancel, left, self.note = state
        self.faults = left - faults
        self.tasks = list(tasks)
        self.subtrees = [list(subtree) for subtree in subtrees]
        # For the oracle a subtree is there until the transaction has made all its changes.
        self.was_there = {place for place, subtree in enumerate(subtrees) if subtree[3]}
        self.open, self.held, self.failed, self.status, self.epoch, self.ends = top
        self.letters = list(letters)
        self.large = large
        self.touched = set()
        self.ended = []
        self.is_back = False
        self.joined = False

    # -------------------------------------------------------------- rows
    def is_there(self, subtree):
        return subtree != TOP and self.subtrees[subtree][3]

    def count(self, subtree, opened, held):
        self.open += opened
        self.held += held
        if self.is_there(subtree):
            self.subtrees[subtree][4] += opened
            self.subtrees[subtree][5] += held if self.rule("hold") else 0
            self.touched.add(subtree)

    def find(self, fork, join):
        for place, subtree in enumerate(self.subtrees):
            if (subtree[0], subtree[1]) == (fork, join):
                return place
        return None

    def add(self, stage, subtree, by):
        # If the subtree is gone, the task belongs to the top, and the oracle's walks end at it.
        join = self.graph.home[stage]
        of = None if by == TOP or self.is_cut(by, join) else self.oracle_finds(by, join)
        if of is None and join is not None or by != TOP and self.is_cut(by, join):
            by = TOP
        if of is not None and not self.subtrees[of][3]:
            self.note = f"the subtree of {self.subtrees[of][0]} ends before {len(self.tasks)}"
        self.tasks.append((stage, UNFINISHED, subtree, by))
        self.count(subtree, 1, 0)

    def is_cut(self, task, join):
        """Whether the subtree of this task is gone. Then all that it sends belongs to the top, but for what opens a
        subtree of its own."""
        of = true_subtree(self.graph, self.tasks, task)
        if of is None or join is not None and self.graph.forks[join] == self.tasks[task][0]:
            return False
        return self.find(*of) not in self.was_there

    def oracle_finds(self, by, join):
        """The subtree of this join that is found by walking back from a task, if it is there."""
        of = subtree_of(self.graph, self.tasks, by, join)
        place = None if of is None else self.find(*of)
        return place if place in self.was_there else None

    def set(self, task, status):
        stage, _, subtree, by = self.tasks[task]
        self.tasks[task] = (stage, status, subtree, by)

    # -------------------------------------------------------------- steps
    def end(self, task, status):
        self.set(task, status)
        self.ended.append(task)
        if status != COMPLETED:
            self.failed += 1
        self.count(self.tasks[task][2], -1, 1 if self.tree.holds(status) else 0)

    def complete(self, task, sent):
        if self.rule("sum"):
            self.send(task, sent)
            self.end(task, COMPLETED)
        else:
            self.end(task, COMPLETED)
            self.settle()
            self.send(task, sent)

    def complete_both(self, one, sent, other, sent_too):
        self.complete(one, sent)
        self.complete(other, sent_too)

    def complete_one(self, one, other):
        self.complete(one, ())
        self.end(other, DEAD)

    def target(self, task, to, opens=True):
        """Returns where an output of a task belongs: a subtree that is there, or the top."""
        graph = self.graph
        stage, _, subtree, _ = self.tasks[task]
        join = to if to in graph.forks else graph.home[to]
        inside = graph.chains[stage]
        own = subtree if self.is_there(subtree) else TOP
        if subtree != TOP and not self.rule("late"):
            own = subtree
        if join is None:
            return TOP if self.rule("leave") else own
        if join not in inside and graph.forks[join] == stage:
            place = self.find(task, join)
            if place is None or not self.subtrees[place][3]:
                return self.open_subtree(task, join, own, place) if opens else TOP
            return place
        if join not in inside:
            return TOP
        levels = inside.index(join)
        if not self.rule("leave"):
            levels = 0
        if levels == 0 and to not in graph.forks and not self.rule("stay") and own != TOP:
            return self.subtrees[own][2]
        for _ in range(levels):
            if own != TOP:
                own = self.subtrees[own][2]
                own = own if self.is_there(own) else TOP
        return own

    def open_subtree(self, task, join, up, place):
        if not self.rule("parent"):
            up = TOP
        row = [task, join, up, 1, 0, 0, 0, (), (), 0]
        if place is None:
            place = len(self.subtrees)
            self.subtrees.append(row)
        else:
            # Happens only without the rule "once": the id of the new subtree's task is taken.
            row[9] = self.subtrees[place][9]
            self.subtrees[place] = row
        self.was_there.add(place)
        if up != TOP and self.rule("children"):
            self.subtrees[up][6] += 1
            self.touched.add(up)
        if self.rule("check new"):
            self.touched.add(place)
        return place

    def send(self, task, sent, credited=True):
        for to, new in sent:
            subtree = self.target(task, to)
            if to in self.graph.forks:
                self.part(task, to, subtree, credited)
            elif new:
                self.add(to, subtree, task)
            elif not self.rule("duplicates"):
                self.count(subtree, 1, 0)

    def part(self, task, join, subtree, credited=True):
        place = None if self.is_cut(task, join) else self.oracle_finds(task, join)
        if credited and place is not None:
            self.subtrees[place][8] = tuple(sorted(self.subtrees[place][8] + (task,)))
        if subtree == TOP:
            return  # late
        row = self.subtrees[subtree]
        row[7] = tuple(sorted(row[7] + (task,)))
        self.touched.add(subtree)
        if not self.rule("parts"):
            self.count(subtree, 1, 0)

    def letter(self, task, to):
        """Makes a letter of an output before its report is settled."""
        self.failed += 1
        self.letters.append((to, TOP, task, None))

    def letter_back(self, place):
        stage, subtree, by, of = self.letters.pop(place)
        self.failed -= 1
        self.is_back = True
        if of is not None:
            # The task of a join has the same id as without the letter.
            self.subtrees[of][9] += 1
        if self.tree.letter_home == "top":
            self.add(stage, TOP, TOP)
        elif of is not None:
            self.add(stage, subtree if self.is_there(subtree) else TOP, by)
        else:
            self.add(stage, self.target(by, stage, opens=False), by)

    def back(self, task):
        status, subtree = self.tasks[task][1:3]
        self.set(task, UNFINISHED)
        if status != COMPLETED:
            self.failed -= 1
        self.is_back = True
        held = -1 if self.tree.holds(status) else 0
        if subtree != TOP and not self.is_there(subtree) and not self.rule("gone"):
            # The row of the subtree is stored again.
            row = self.subtrees[subtree]
            row[3] = 1
            row[4:7] = [0, 0, 0]
        if self.rule("back"):
            self.count(subtree, 1, held)
        else:
            self.count(TOP, 1, held)
            if self.is_there(subtree):
                self.subtrees[subtree][5] += held

    def purge(self, task):
        self.set(task, PURGED)
        held = -1 if self.tree.holds(DEAD) else 0
        self.count(self.tasks[task][2] if self.rule("purge") else TOP, 0, held)

    def mark(self):
        self.cancel = len(self.tasks)

    def walk(self):
        self.cancel -= 1
        if self.tasks[self.cancel][1] == UNFINISHED:
            self.end(self.cancel, CANCELLED)

    def repeated(self, task):
        """Counts the end of a task again."""
        self.count(self.tasks[task][2], -1, 0)

    def surplus(self, task, to):
        """Takes the part of a second worker's report, or counts its task, which is not stored in the tree."""
        if to in self.graph.forks:
            self.part(task, to, self.target(task, to), credited=False)
        else:
            self.count(self.target(task, to), 1, 0)

    # -------------------------------------------------------------- the end of a transaction
    def finish(self):
        if self.is_back:
            self.cancel = None
        self.settle()
        return (
            tuple(self.tasks), tuple(tuple(subtree) for subtree in self.subtrees),
            (self.open, self.held, self.failed, self.status, self.epoch, self.ends), tuple(self.letters), self.cancel,
            self.faults, self.note,
        )

    def settle(self):
        """Ends subtrees with nothing left, from the inside out, and then the tree."""
        later = []
        while self.touched:
            subtree = max(self.touched)
            self.touched.remove(subtree)
            if self.is_there(subtree) and self.is_zero(subtree):
                self.close(subtree, later)
        if not self.rule("one transaction"):
            self.check_tree()
        for stage, subtree, by in later:
            self.add(stage, subtree, by)
        self.touched.clear()
        self.check_tree()

    def is_zero(self, subtree):
        fork, _, _, _, open_, held, children = self.subtrees[subtree][:7]
        for task in self.ended:
            others = [other for other, (_, status, _, _) in enumerate(self.tasks) if status == UNFINISHED]
            if self.tasks[task][2] != subtree:
                continue
            if not self.rule("all branches"):
                # Nothing is unfinished of what came from the same output of the fork.
                if all(self.branch(fork, other) != self.branch(fork, task) for other in others):
                    return True
            if not self.rule("all stages"):
                if all(self.tasks[other][0] != self.tasks[task][0] for other in others):
                    return True
        return open_ == 0 and held == 0 and children == 0

    def branch(self, fork, task):
        while task != TOP and self.tasks[task][3] != fork:
            task = self.tasks[task][3]
        return None if task == TOP else task

    def close(self, subtree, later):
        """Ends a subtree: its parts become a task in the parent."""
        fork, join, up, _, _, _, _, parts, sent, made = self.subtrees[subtree]
        self.oracle_checks(subtree)
        if parts != sent:
            self.note = f"the join of {fork} gets parts {parts}: credited completions sent {sent}"
        makes = parts and (self.cancel is None or not self.rule("no join under a cancel"))
        if makes and made:
            self.note = f"the join of {fork} has a task already: parts {parts} are lost"
        elif makes:
            self.joined = True
            parent = up if self.is_there(up) and self.rule("join in parent") else TOP
            if not self.large:
                made += 1
                if self.rule("one transaction"):
                    self.add(join, parent, fork)
                else:
                    later.append((join, parent, fork))
            elif self.rule("large"):
                self.failed += 1
                self.letters.append((join, parent, fork, subtree))
            else:
                self.note = f"parts {parts} of {fork} became neither a task nor a letter"
        elif sent and self.cancel is None:
            self.note = f"the subtree of {fork} had parts {sent}, and becomes no task"
        if not self.rule("remove parts"):
            self.subtrees[subtree][3:] = [0, 0, 0, 0, parts, sent, made]
        else:
            self.subtrees[subtree][3:] = [0, 0, 0, 0, (), (), made]
        if self.is_there(up):
            if self.rule("children"):
                self.subtrees[up][6] -= 1
            if self.rule("check parent"):
                self.touched.add(up)

    def oracle_checks(self, subtree):
        """Notes a task that still belongs to this subtree or to one within it."""
        fork, join = self.subtrees[subtree][:2]
        for task, (_, status, _, _) in enumerate(self.tasks):
            if status == UNFINISHED or self.tree.holds(status):
                of = true_subtree(self.graph, self.tasks, task)
                while of is not None and of != (fork, join) and self.find(*of) in self.was_there:
                    of = true_subtree(self.graph, self.tasks, of[0])
                if of == (fork, join):
                    self.note = f"the subtree of {fork} ends before {task}"

    def check_tree(self):
        if self.status != OPEN and self.open > 0:
            self.status = OPEN
            self.epoch += 1
        if self.status == OPEN and self.open == 0 and (self.held == 0 or self.cancel is not None):
            self.status = FAILED if self.failed and self.tree.on_dead != "ignore" else DONE
            self.ends += 1
            # A dead task under `hold` keeps its subtree, but no longer the tree: the end removes both.
            if self.cancel is not None and self.rule("sweep"):
                for row in self.subtrees:
                    row[3:9] = [0, 0, 0, 0, (), ()]


# ------------------------------------------------------------------ scenarios
def all_of(sizes, back=0, **settings):
    for n in sizes:
        for graph in graphs(n, back):
            yield Tree(graph, **settings)


def check_widest():
    """Checks that all graphs are parts of widest ones."""
    for graph in itertools.chain(*(graphs(n) for n in (2, 3, 4, 5)), *(graphs(n, back=1) for n in (2, 3, 4))):
        (join, fork), = graph.forks.items()
        level = sorted(graph.levels[join])
        order = [fork, join] + level + [stage for stage in range(graph.n) if stage not in (fork, join, *level)]
        edges = {(order.index(of), order.index(to)) for of, to in graph.edges}
        assert edges <= set(widest(graph.n - 2 - len(level), len(level)).edges), graph.edges
    return widest_of(tasks=4, roots=(0, 2, 3))


def widest_of(**settings):
    return [Tree(widest(outside=1, level=1), **settings)]


# Stage 0 is the fork of join 1. Stage 2 is the fork of join 3, with stage 4 between them.
NESTED = {1: 0, 3: 2}
CHAIN = Graph(5, [(0, 2), (2, 4), (4, 3), (3, 1)], NESTED)
SHORT_CUTS = Graph(5, [(0, 2), (2, 4), (4, 3), (3, 1), (0, 1), (2, 1), (2, 3), (4, 1)], NESTED)
LOOPS = Graph(
    6, [(0, 2), (2, 4), (4, 3), (3, 1), (0, 5), (4, 5), (5, 1), (4, 2), (3, 2), (5, 2), (4, 4), (4, 0), (1, 0)], NESTED
)
# Join 1 is itself the fork of join 3; and two joins of one fork, side by side.
IN_TURN = Graph(5, [(0, 2), (2, 1), (1, 4), (4, 3), (3, 0), (0, 1), (1, 3)], {1: 0, 3: 1})
SIDE_BY_SIDE = Graph(5, [(0, 2), (2, 1), (0, 4), (4, 3), (0, 1), (0, 3), (2, 0)], {1: 0, 3: 0})

LINE = Graph(3, [(0, 2), (2, 1)], {1: 0})
LONG = Graph(4, [(0, 2), (2, 3), (3, 1)], {1: 0})
# a sends to b and c, both send to d, the join, and d to e.
DIAMOND = Graph(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)], {3: 0})
ASIDE = Graph(4, [(0, 2), (2, 1), (2, 3)], {1: 0})


def one(graph, *without, **settings):
    """One graph without some rules. A wrong count is not enough to break it: something must follow from the count."""
    return [Tree(graph, books=False, without=without, **settings)]


SCENARIOS = [
    ("all graphs of up to 5 stages, up to 4 tasks", HOLDS, lambda: all_of((2, 3, 4, 5), tasks=4)),
    ("all graphs of up to 4 stages, 3 tasks, a fault", HOLDS, lambda: all_of((2, 3, 4), tasks=3, faults=1)),
    ("all graphs of up to 4 stages, hold, a fault", HOLDS,
     lambda: all_of((2, 3, 4), tasks=3, faults=1, on_dead="hold")),
    ("all graphs of up to 4 stages and an edge back", HOLDS, lambda: all_of((2, 3, 4), back=1, tasks=3)),
    ("widest graph: 4 tasks, roots anywhere", HOLDS, check_widest),
    ("widest graph: two reports in a transaction", HOLDS,
     lambda: widest_of(tasks=3, faults=1, on_dead="hold", batch=True)),
    ("widest graph: count, three faults", HOLDS, lambda: widest_of(tasks=2, faults=3, roots=(0, 2, 3))),
    ("widest graph: hold, three faults", HOLDS,
     lambda: widest_of(tasks=2, faults=3, on_dead="hold", roots=(0, 2, 3))),
    ("widest graph: ignore, letters to the top", HOLDS,
     lambda: widest_of(tasks=2, faults=3, on_dead="ignore", letter_home="top")),
    ("widest graph: hold, 3 tasks, two faults", HOLDS, lambda: widest_of(tasks=3, faults=2, on_dead="hold")),
    ("nested: up to 5 tasks", HOLDS, lambda: [Tree(graph, tasks=5) for graph in (CHAIN, SHORT_CUTS, LOOPS)]),
    ("nested: count, 3 tasks, two faults", HOLDS,
     lambda: [Tree(graph, tasks=3, faults=2) for graph in (CHAIN, LOOPS)]),
    ("nested: hold, 3 tasks, two faults", HOLDS,
     lambda: [Tree(graph, tasks=3, faults=2, on_dead="hold") for graph in (CHAIN, SHORT_CUTS, LOOPS)]),
    ("nested: hold, 4 tasks, two faults", HOLDS, lambda: [Tree(CHAIN, tasks=4, faults=2, on_dead="hold")]),
    ("two joins, in turn and side by side: 4 tasks", HOLDS,
     lambda: [Tree(graph, tasks=4) for graph in (IN_TURN, SIDE_BY_SIDE)]),
    ("two joins, in turn and side by side: hold, a fault", HOLDS,
     lambda: [Tree(graph, tasks=3, faults=1, on_dead="hold") for graph in (IN_TURN, SIDE_BY_SIDE)]),
    ("T1: one branch is over", BREAKS, lambda: one(DIAMOND, "all branches", tasks=3)),
    ("T2: one stage is over", BREAKS, lambda: one(DIAMOND, "all stages", tasks=3)),
    ("an end is counted before its outputs", BREAKS, lambda: one(LONG, "sum", tasks=3)),
    ("a tree is checked before the join's task is stored", BREAKS, lambda: one(LINE, "one transaction")),
    ("a duplicate counts", BREAKS, lambda: one(LINE, "duplicates")),
    ("a part counts", BREAKS, lambda: one(LINE, "parts")),
    ("parts stay behind", BREAKS, lambda: one(LINE, "remove parts")),
    ("a subtree is not checked when it is opened", BREAKS, lambda: one(LINE, "check new")),
    ("an output within the level leaves the subtree", BREAKS, lambda: one(LONG, "stay", tasks=3)),
    ("an output out of the level stays in the subtree", BREAKS, lambda: one(ASIDE, "leave")),
    ("a subtree does not count in its parent", BREAKS, lambda: one(CHAIN, "children", tasks=3)),
    ("a subtree has no parent", BREAKS, lambda: one(CHAIN, "parent", tasks=3)),
    ("the task of a join is not in the parent", BREAKS, lambda: one(CHAIN, "join in parent", tasks=3)),
    ("a parent is not checked again", BREAKS, lambda: one(CHAIN, "check parent", tasks=3)),
    ("what is sent again counts only at the top", BREAKS,
     lambda: one(LINE, "back", tasks=3, faults=2, steps=["die", "back"])),
    ("what is sent again brings its subtree back", BREAKS,
     lambda: one(LINE, "gone", tasks=3, faults=2, steps=["die", "back"])),
    ("a late part is taken", BREAKS, lambda: one(LINE, "late", tasks=3, faults=2, steps=["die", "back"])),
    ("a repeated report counts", BREAKS, lambda: one(LONG, "repeated", tasks=4, faults=1)),
    ("a surplus report's task counts", BREAKS, lambda: one(LONG, "surplus task", tasks=3, faults=1)),
    ("a surplus report's part is taken", BREAKS, lambda: one(LINE, "surplus part", tasks=3, faults=2)),
    ("a dead task does not hold its subtree", BREAKS, lambda: one(LINE, "hold", on_dead="hold", faults=1)),
    ("a purge does not reach the subtree", BREAKS, lambda: one(LINE, "purge", on_dead="hold", faults=2)),
    ("a cancel does not mark the tree", BREAKS, lambda: one(LONG, "mark", tasks=4, faults=1)),
    ("a join is made under the cancel", BREAKS, lambda: one(LINE, "no join under a cancel", tasks=3, faults=1)),
    ("a cancelled tree keeps subtrees that are held", BREAKS,
     lambda: one(LINE, "sweep", on_dead="hold", faults=2)),
    ("a join that is too large is dropped", BREAKS, lambda: one(LINE, "large", faults=1)),
    ("a fork's task completes twice", BREAKS, lambda: one(LINE, "once", faults=1)),
]


def main():
    wrong = 0
    for name, expect, make in SCENARIOS:
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        began = time.time()
        states = 0
        found = None
        for tree, root in ((tree, root) for tree in make() for root in tree.roots):
            parent, _, bad = explore(tree.initial(root), tree.actions, tree.invariant)
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
            joins = ", ".join(f"{join} of {fork}" for join, fork in tree.graph.forks.items())
            print("    ", bad[0])
            print("      graph", tree.graph.edges, "join", joins, ":", " | ".join(trace(parent, bad[1])))
            if not ok:
                print("      state", bad[1])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
