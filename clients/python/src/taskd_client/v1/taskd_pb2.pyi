import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]
    PRIORITY_MEDIUM: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_BYTES: _ClassVar[Encoding]
    ENCODING_TEXT: _ClassVar[Encoding]
    ENCODING_JSON: _ClassVar[Encoding]

class OnDead(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_DEAD_UNSPECIFIED: _ClassVar[OnDead]
    ON_DEAD_NEXT: _ClassVar[OnDead]
    ON_DEAD_HOLD: _ClassVar[OnDead]

class TreeOnDead(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TREE_ON_DEAD_UNSPECIFIED: _ClassVar[TreeOnDead]
    TREE_ON_DEAD_COUNT: _ClassVar[TreeOnDead]
    TREE_ON_DEAD_IGNORE: _ClassVar[TreeOnDead]
    TREE_ON_DEAD_HOLD: _ClassVar[TreeOnDead]

class BackoffKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKOFF_KIND_UNSPECIFIED: _ClassVar[BackoffKind]
    BACKOFF_KIND_CONSTANT: _ClassVar[BackoffKind]
    BACKOFF_KIND_LINEAR: _ClassVar[BackoffKind]
    BACKOFF_KIND_EXPONENTIAL: _ClassVar[BackoffKind]

class WaitFor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_FOR_UNSPECIFIED: _ClassVar[WaitFor]
    WAIT_FOR_TASK: _ClassVar[WaitFor]
    WAIT_FOR_TREE: _ClassVar[WaitFor]

class InsertStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSERT_STATUS_UNSPECIFIED: _ClassVar[InsertStatus]
    INSERT_STATUS_CREATED: _ClassVar[InsertStatus]
    INSERT_STATUS_DUPLICATE: _ClassVar[InsertStatus]
    INSERT_STATUS_REJECTED: _ClassVar[InsertStatus]
    INSERT_STATUS_TRY_LATER: _ClassVar[InsertStatus]

class TaskStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_STATUS_UNSPECIFIED: _ClassVar[TaskStatus]
    TASK_STATUS_PENDING: _ClassVar[TaskStatus]
    TASK_STATUS_QUEUED: _ClassVar[TaskStatus]
    TASK_STATUS_ASSIGNED: _ClassVar[TaskStatus]
    TASK_STATUS_DELAYED: _ClassVar[TaskStatus]
    TASK_STATUS_COMPLETED: _ClassVar[TaskStatus]
    TASK_STATUS_DEAD: _ClassVar[TaskStatus]
    TASK_STATUS_CANCELLED: _ClassVar[TaskStatus]

class AttemptState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTEMPT_STATE_UNSPECIFIED: _ClassVar[AttemptState]
    ATTEMPT_STATE_LEASED: _ClassVar[AttemptState]
    ATTEMPT_STATE_COMPLETED: _ClassVar[AttemptState]
    ATTEMPT_STATE_REJECTED: _ClassVar[AttemptState]
    ATTEMPT_STATE_EXPIRED: _ClassVar[AttemptState]

class TaskPlace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_PLACE_UNSPECIFIED: _ClassVar[TaskPlace]
    TASK_PLACE_FINISHED: _ClassVar[TaskPlace]
    TASK_PLACE_OUTBOX: _ClassVar[TaskPlace]
    TASK_PLACE_PARKED: _ClassVar[TaskPlace]
    TASK_PLACE_SCHEDULED: _ClassVar[TaskPlace]
    TASK_PLACE_BUS: _ClassVar[TaskPlace]
    TASK_PLACE_WAITING: _ClassVar[TaskPlace]
    TASK_PLACE_LEASED: _ClassVar[TaskPlace]
    TASK_PLACE_DELAYED: _ClassVar[TaskPlace]
    TASK_PLACE_REPORTED: _ClassVar[TaskPlace]
    TASK_PLACE_LOST: _ClassVar[TaskPlace]
    TASK_PLACE_BEHIND: _ClassVar[TaskPlace]

class WorkerReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_REASON_UNSPECIFIED: _ClassVar[WorkerReason]
    WORKER_REASON_MAY_GET: _ClassVar[WorkerReason]
    WORKER_REASON_COMPLETED_IT: _ClassVar[WorkerReason]
    WORKER_REASON_HOLDS_IT: _ClassVar[WorkerReason]
    WORKER_REASON_REFUSED_IT: _ClassVar[WorkerReason]
    WORKER_REASON_NOT_DUE: _ClassVar[WorkerReason]
    WORKER_REASON_IN_BACKOFF: _ClassVar[WorkerReason]
    WORKER_REASON_LEASED_BY_OTHERS: _ClassVar[WorkerReason]
    WORKER_REASON_FINISHED: _ClassVar[WorkerReason]
    WORKER_REASON_NOT_IN_QUEUE: _ClassVar[WorkerReason]
    WORKER_REASON_CLAIMS_PAUSED: _ClassVar[WorkerReason]
    WORKER_REASON_QUEUE_PAUSED: _ClassVar[WorkerReason]
    WORKER_REASON_RESERVED_FOR_ANOTHER: _ClassVar[WorkerReason]
    WORKER_REASON_LIMIT_REACHED: _ClassVar[WorkerReason]

class ItemStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_STATUS_UNSPECIFIED: _ClassVar[ItemStatus]
    ITEM_STATUS_OK: _ClassVar[ItemStatus]
    ITEM_STATUS_LEASE_LOST: _ClassVar[ItemStatus]
    ITEM_STATUS_ALREADY_COMPLETED: _ClassVar[ItemStatus]
    ITEM_STATUS_UNKNOWN_TASK: _ClassVar[ItemStatus]
    ITEM_STATUS_CANCELLED: _ClassVar[ItemStatus]
    ITEM_STATUS_INVALID: _ClassVar[ItemStatus]
    ITEM_STATUS_TRY_LATER: _ClassVar[ItemStatus]

class BulkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BULK_STATE_UNSPECIFIED: _ClassVar[BulkState]
    BULK_STATE_RUNNING: _ClassVar[BulkState]
    BULK_STATE_DONE: _ClassVar[BulkState]
    BULK_STATE_STOPPED: _ClassVar[BulkState]
    BULK_STATE_FAILED: _ClassVar[BulkState]

class LetterKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LETTER_KIND_UNSPECIFIED: _ClassVar[LetterKind]
    LETTER_KIND_TASK: _ClassVar[LetterKind]
    LETTER_KIND_DISCOVERED: _ClassVar[LetterKind]
    LETTER_KIND_RECORD: _ClassVar[LetterKind]
    LETTER_KIND_REFUSED: _ClassVar[LetterKind]

class BooksState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOOKS_STATE_UNSPECIFIED: _ClassVar[BooksState]
    BOOKS_STATE_BALANCED: _ClassVar[BooksState]
    BOOKS_STATE_MOVING: _ClassVar[BooksState]
    BOOKS_STATE_UNBALANCED: _ClassVar[BooksState]

class PublishStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUBLISH_STATUS_UNSPECIFIED: _ClassVar[PublishStatus]
    PUBLISH_STATUS_STORED: _ClassVar[PublishStatus]
    PUBLISH_STATUS_REJECTED: _ClassVar[PublishStatus]
    PUBLISH_STATUS_TRY_LATER: _ClassVar[PublishStatus]

class RecordFate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORD_FATE_UNSPECIFIED: _ClassVar[RecordFate]
    RECORD_FATE_TASK: _ClassVar[RecordFate]
    RECORD_FATE_FILTERED: _ClassVar[RecordFate]
    RECORD_FATE_REFUSED: _ClassVar[RecordFate]
    RECORD_FATE_BEHIND: _ClassVar[RecordFate]
    RECORD_FATE_SKIPPED: _ClassVar[RecordFate]
    RECORD_FATE_NO_TASK: _ClassVar[RecordFate]

class TreeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TREE_STATE_UNSPECIFIED: _ClassVar[TreeState]
    TREE_STATE_OPEN: _ClassVar[TreeState]
    TREE_STATE_DONE: _ClassVar[TreeState]
    TREE_STATE_FAILED: _ClassVar[TreeState]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_HIGH: Priority
PRIORITY_MEDIUM: Priority
PRIORITY_LOW: Priority
ENCODING_UNSPECIFIED: Encoding
ENCODING_BYTES: Encoding
ENCODING_TEXT: Encoding
ENCODING_JSON: Encoding
ON_DEAD_UNSPECIFIED: OnDead
ON_DEAD_NEXT: OnDead
ON_DEAD_HOLD: OnDead
TREE_ON_DEAD_UNSPECIFIED: TreeOnDead
TREE_ON_DEAD_COUNT: TreeOnDead
TREE_ON_DEAD_IGNORE: TreeOnDead
TREE_ON_DEAD_HOLD: TreeOnDead
BACKOFF_KIND_UNSPECIFIED: BackoffKind
BACKOFF_KIND_CONSTANT: BackoffKind
BACKOFF_KIND_LINEAR: BackoffKind
BACKOFF_KIND_EXPONENTIAL: BackoffKind
WAIT_FOR_UNSPECIFIED: WaitFor
WAIT_FOR_TASK: WaitFor
WAIT_FOR_TREE: WaitFor
INSERT_STATUS_UNSPECIFIED: InsertStatus
INSERT_STATUS_CREATED: InsertStatus
INSERT_STATUS_DUPLICATE: InsertStatus
INSERT_STATUS_REJECTED: InsertStatus
INSERT_STATUS_TRY_LATER: InsertStatus
TASK_STATUS_UNSPECIFIED: TaskStatus
TASK_STATUS_PENDING: TaskStatus
TASK_STATUS_QUEUED: TaskStatus
TASK_STATUS_ASSIGNED: TaskStatus
TASK_STATUS_DELAYED: TaskStatus
TASK_STATUS_COMPLETED: TaskStatus
TASK_STATUS_DEAD: TaskStatus
TASK_STATUS_CANCELLED: TaskStatus
ATTEMPT_STATE_UNSPECIFIED: AttemptState
ATTEMPT_STATE_LEASED: AttemptState
ATTEMPT_STATE_COMPLETED: AttemptState
ATTEMPT_STATE_REJECTED: AttemptState
ATTEMPT_STATE_EXPIRED: AttemptState
TASK_PLACE_UNSPECIFIED: TaskPlace
TASK_PLACE_FINISHED: TaskPlace
TASK_PLACE_OUTBOX: TaskPlace
TASK_PLACE_PARKED: TaskPlace
TASK_PLACE_SCHEDULED: TaskPlace
TASK_PLACE_BUS: TaskPlace
TASK_PLACE_WAITING: TaskPlace
TASK_PLACE_LEASED: TaskPlace
TASK_PLACE_DELAYED: TaskPlace
TASK_PLACE_REPORTED: TaskPlace
TASK_PLACE_LOST: TaskPlace
TASK_PLACE_BEHIND: TaskPlace
WORKER_REASON_UNSPECIFIED: WorkerReason
WORKER_REASON_MAY_GET: WorkerReason
WORKER_REASON_COMPLETED_IT: WorkerReason
WORKER_REASON_HOLDS_IT: WorkerReason
WORKER_REASON_REFUSED_IT: WorkerReason
WORKER_REASON_NOT_DUE: WorkerReason
WORKER_REASON_IN_BACKOFF: WorkerReason
WORKER_REASON_LEASED_BY_OTHERS: WorkerReason
WORKER_REASON_FINISHED: WorkerReason
WORKER_REASON_NOT_IN_QUEUE: WorkerReason
WORKER_REASON_CLAIMS_PAUSED: WorkerReason
WORKER_REASON_QUEUE_PAUSED: WorkerReason
WORKER_REASON_RESERVED_FOR_ANOTHER: WorkerReason
WORKER_REASON_LIMIT_REACHED: WorkerReason
ITEM_STATUS_UNSPECIFIED: ItemStatus
ITEM_STATUS_OK: ItemStatus
ITEM_STATUS_LEASE_LOST: ItemStatus
ITEM_STATUS_ALREADY_COMPLETED: ItemStatus
ITEM_STATUS_UNKNOWN_TASK: ItemStatus
ITEM_STATUS_CANCELLED: ItemStatus
ITEM_STATUS_INVALID: ItemStatus
ITEM_STATUS_TRY_LATER: ItemStatus
BULK_STATE_UNSPECIFIED: BulkState
BULK_STATE_RUNNING: BulkState
BULK_STATE_DONE: BulkState
BULK_STATE_STOPPED: BulkState
BULK_STATE_FAILED: BulkState
LETTER_KIND_UNSPECIFIED: LetterKind
LETTER_KIND_TASK: LetterKind
LETTER_KIND_DISCOVERED: LetterKind
LETTER_KIND_RECORD: LetterKind
LETTER_KIND_REFUSED: LetterKind
BOOKS_STATE_UNSPECIFIED: BooksState
BOOKS_STATE_BALANCED: BooksState
BOOKS_STATE_MOVING: BooksState
BOOKS_STATE_UNBALANCED: BooksState
PUBLISH_STATUS_UNSPECIFIED: PublishStatus
PUBLISH_STATUS_STORED: PublishStatus
PUBLISH_STATUS_REJECTED: PublishStatus
PUBLISH_STATUS_TRY_LATER: PublishStatus
RECORD_FATE_UNSPECIFIED: RecordFate
RECORD_FATE_TASK: RecordFate
RECORD_FATE_FILTERED: RecordFate
RECORD_FATE_REFUSED: RecordFate
RECORD_FATE_BEHIND: RecordFate
RECORD_FATE_SKIPPED: RecordFate
RECORD_FATE_NO_TASK: RecordFate
TREE_STATE_UNSPECIFIED: TreeState
TREE_STATE_OPEN: TreeState
TREE_STATE_DONE: TreeState
TREE_STATE_FAILED: TreeState

class NewTask(_message.Message):
    __slots__ = ("queue", "key", "payload", "replicas", "priority", "delay", "not_before", "lease_duration", "max_attempts", "headers", "traceparent", "payload_encoding", "idempotency_key", "backoff", "deadline", "finish_within", "limit_key", "sequence", "on_dead", "tree", "port")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ENCODING_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    FINISH_WITHIN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ON_DEAD_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    key: bytes
    payload: bytes
    replicas: int
    priority: Priority
    delay: _duration_pb2.Duration
    not_before: _timestamp_pb2.Timestamp
    lease_duration: _duration_pb2.Duration
    max_attempts: int
    headers: _containers.ScalarMap[str, str]
    traceparent: str
    payload_encoding: Encoding
    idempotency_key: str
    backoff: Backoff
    deadline: _timestamp_pb2.Timestamp
    finish_within: _duration_pb2.Duration
    limit_key: str
    sequence: str
    on_dead: OnDead
    tree: TaskTree
    port: str
    def __init__(self, queue: _Optional[str] = ..., key: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., replicas: _Optional[int] = ..., priority: _Optional[_Union[Priority, str]] = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., not_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_attempts: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ..., traceparent: _Optional[str] = ..., payload_encoding: _Optional[_Union[Encoding, str]] = ..., idempotency_key: _Optional[str] = ..., backoff: _Optional[_Union[Backoff, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finish_within: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., limit_key: _Optional[str] = ..., sequence: _Optional[str] = ..., on_dead: _Optional[_Union[OnDead, str]] = ..., tree: _Optional[_Union[TaskTree, _Mapping]] = ..., port: _Optional[str] = ...) -> None: ...

class TaskTree(_message.Message):
    __slots__ = ("id", "then", "timeout", "on_dead")
    ID_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ON_DEAD_FIELD_NUMBER: _ClassVar[int]
    id: str
    then: str
    timeout: _duration_pb2.Duration
    on_dead: TreeOnDead
    def __init__(self, id: _Optional[str] = ..., then: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., on_dead: _Optional[_Union[TreeOnDead, str]] = ...) -> None: ...

class Backoff(_message.Message):
    __slots__ = ("kind", "initial", "maximum", "jitter", "give_up_after")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_AFTER_FIELD_NUMBER: _ClassVar[int]
    kind: BackoffKind
    initial: _duration_pb2.Duration
    maximum: _duration_pb2.Duration
    jitter: float
    give_up_after: _duration_pb2.Duration
    def __init__(self, kind: _Optional[_Union[BackoffKind, str]] = ..., initial: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., maximum: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., jitter: _Optional[float] = ..., give_up_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class InsertTasksRequest(_message.Message):
    __slots__ = ("tasks", "wait", "max_bytes", "wait_for")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[NewTask]
    wait: _duration_pb2.Duration
    max_bytes: int
    wait_for: WaitFor
    def __init__(self, tasks: _Optional[_Iterable[_Union[NewTask, _Mapping]]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_bytes: _Optional[int] = ..., wait_for: _Optional[_Union[WaitFor, str]] = ...) -> None: ...

class InsertResult(_message.Message):
    __slots__ = ("status", "id", "error", "task_status", "results", "tree", "tree_state")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TASK_STATUS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    TREE_STATE_FIELD_NUMBER: _ClassVar[int]
    status: InsertStatus
    id: str
    error: str
    task_status: TaskStatus
    results: _containers.RepeatedCompositeFieldContainer[TaskResult]
    tree: str
    tree_state: TreeState
    def __init__(self, status: _Optional[_Union[InsertStatus, str]] = ..., id: _Optional[str] = ..., error: _Optional[str] = ..., task_status: _Optional[_Union[TaskStatus, str]] = ..., results: _Optional[_Iterable[_Union[TaskResult, _Mapping]]] = ..., tree: _Optional[str] = ..., tree_state: _Optional[_Union[TreeState, str]] = ...) -> None: ...

class InsertTasksResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[InsertResult]
    def __init__(self, results: _Optional[_Iterable[_Union[InsertResult, _Mapping]]] = ...) -> None: ...

class TaskResult(_message.Message):
    __slots__ = ("worker", "result", "result_encoding", "attempt", "completed_at", "surplus")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESULT_ENCODING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_AT_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    result: bytes
    result_encoding: Encoding
    attempt: int
    completed_at: _timestamp_pb2.Timestamp
    surplus: bool
    def __init__(self, worker: _Optional[str] = ..., result: _Optional[bytes] = ..., result_encoding: _Optional[_Union[Encoding, str]] = ..., attempt: _Optional[int] = ..., completed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., surplus: bool = ...) -> None: ...

class WatchTaskRequest(_message.Message):
    __slots__ = ("id", "last_event_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    last_event_id: str
    def __init__(self, id: _Optional[str] = ..., last_event_id: _Optional[str] = ...) -> None: ...

class WatchQueueRequest(_message.Message):
    __slots__ = ("queue", "last_event_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    last_event_id: str
    def __init__(self, queue: _Optional[str] = ..., last_event_id: _Optional[str] = ...) -> None: ...

class TaskEvent(_message.Message):
    __slots__ = ("event_id", "id", "queue", "status", "at", "gap", "key")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    id: str
    queue: str
    status: TaskStatus
    at: _timestamp_pb2.Timestamp
    gap: bool
    key: bytes
    def __init__(self, event_id: _Optional[str] = ..., id: _Optional[str] = ..., queue: _Optional[str] = ..., status: _Optional[_Union[TaskStatus, str]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., gap: bool = ..., key: _Optional[bytes] = ...) -> None: ...

class GetTaskRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("id", "queue", "key", "status", "replicas", "completed", "leased", "attempts", "priority", "created_at", "updated_at", "not_before", "reason", "payload", "payload_encoding", "headers", "traceparent", "history", "acts", "results", "backoff", "deadline", "sequence", "tree")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ENCODING_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    ACTS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    id: str
    queue: str
    key: bytes
    status: TaskStatus
    replicas: int
    completed: int
    leased: int
    attempts: int
    priority: Priority
    created_at: _timestamp_pb2.Timestamp
    updated_at: _timestamp_pb2.Timestamp
    not_before: _timestamp_pb2.Timestamp
    reason: str
    payload: bytes
    payload_encoding: Encoding
    headers: _containers.ScalarMap[str, str]
    traceparent: str
    history: _containers.RepeatedCompositeFieldContainer[TaskAttempt]
    acts: _containers.RepeatedCompositeFieldContainer[TaskAct]
    results: int
    backoff: Backoff
    deadline: _timestamp_pb2.Timestamp
    sequence: str
    tree: str
    def __init__(self, id: _Optional[str] = ..., queue: _Optional[str] = ..., key: _Optional[bytes] = ..., status: _Optional[_Union[TaskStatus, str]] = ..., replicas: _Optional[int] = ..., completed: _Optional[int] = ..., leased: _Optional[int] = ..., attempts: _Optional[int] = ..., priority: _Optional[_Union[Priority, str]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., updated_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., not_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ..., payload: _Optional[bytes] = ..., payload_encoding: _Optional[_Union[Encoding, str]] = ..., headers: _Optional[_Mapping[str, str]] = ..., traceparent: _Optional[str] = ..., history: _Optional[_Iterable[_Union[TaskAttempt, _Mapping]]] = ..., acts: _Optional[_Iterable[_Union[TaskAct, _Mapping]]] = ..., results: _Optional[int] = ..., backoff: _Optional[_Union[Backoff, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sequence: _Optional[str] = ..., tree: _Optional[str] = ...) -> None: ...

class TaskAttempt(_message.Message):
    __slots__ = ("worker", "state", "until", "lease_expires_at", "attempt", "reason", "surplus")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    state: AttemptState
    until: _timestamp_pb2.Timestamp
    lease_expires_at: _timestamp_pb2.Timestamp
    attempt: int
    reason: str
    surplus: bool
    def __init__(self, worker: _Optional[str] = ..., state: _Optional[_Union[AttemptState, str]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., lease_expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., surplus: bool = ..., **kwargs) -> None: ...

class TaskAct(_message.Message):
    __slots__ = ("id", "at", "who", "what")
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    id: str
    at: _timestamp_pb2.Timestamp
    who: str
    what: str
    def __init__(self, id: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., who: _Optional[str] = ..., what: _Optional[str] = ...) -> None: ...

class TaskFilter(_message.Message):
    __slots__ = ("queue", "statuses", "key", "key_prefix", "headers", "worker", "since", "until", "reason", "as_of", "tree")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    statuses: _containers.RepeatedScalarFieldContainer[TaskStatus]
    key: bytes
    key_prefix: bytes
    headers: _containers.ScalarMap[str, str]
    worker: str
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    reason: str
    as_of: _timestamp_pb2.Timestamp
    tree: str
    def __init__(self, queue: _Optional[str] = ..., statuses: _Optional[_Iterable[_Union[TaskStatus, str]]] = ..., key: _Optional[bytes] = ..., key_prefix: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., worker: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ..., as_of: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tree: _Optional[str] = ...) -> None: ...

class ListTasksRequest(_message.Message):
    __slots__ = ("filter", "limit", "cursor")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    filter: TaskFilter
    limit: int
    cursor: str
    def __init__(self, filter: _Optional[_Union[TaskFilter, _Mapping]] = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListTasksResponse(_message.Message):
    __slots__ = ("tasks", "cursor", "looked_at", "partial")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    cursor: str
    looked_at: int
    partial: bool
    def __init__(self, tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., cursor: _Optional[str] = ..., looked_at: _Optional[int] = ..., partial: bool = ...) -> None: ...

class ExplainTaskRequest(_message.Message):
    __slots__ = ("id", "queue", "key", "worker")
    ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    id: str
    queue: str
    key: bytes
    worker: str
    def __init__(self, id: _Optional[str] = ..., queue: _Optional[str] = ..., key: _Optional[bytes] = ..., worker: _Optional[str] = ...) -> None: ...

class TaskLease(_message.Message):
    __slots__ = ("worker", "lease_expires_at", "delivered")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    lease_expires_at: _timestamp_pb2.Timestamp
    delivered: bool
    def __init__(self, worker: _Optional[str] = ..., lease_expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., delivered: bool = ...) -> None: ...

class TaskFailure(_message.Message):
    __slots__ = ("at", "worker", "reason")
    AT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    worker: str
    reason: str
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., worker: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerAnswer(_message.Message):
    __slots__ = ("worker", "may_get", "reason", "says", "until")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAY_GET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    may_get: bool
    reason: WorkerReason
    says: str
    until: _timestamp_pb2.Timestamp
    def __init__(self, worker: _Optional[str] = ..., may_get: bool = ..., reason: _Optional[_Union[WorkerReason, str]] = ..., says: _Optional[str] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class TaskExplanation(_message.Message):
    __slots__ = ("task", "place", "says", "since", "next", "next_at", "leases", "completed_by", "failures", "notes", "worker", "now")
    TASK_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_AT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_BY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    task: Task
    place: TaskPlace
    says: str
    since: _timestamp_pb2.Timestamp
    next: str
    next_at: _timestamp_pb2.Timestamp
    leases: _containers.RepeatedCompositeFieldContainer[TaskLease]
    completed_by: _containers.RepeatedScalarFieldContainer[str]
    failures: _containers.RepeatedCompositeFieldContainer[TaskFailure]
    notes: _containers.RepeatedScalarFieldContainer[str]
    worker: WorkerAnswer
    now: _timestamp_pb2.Timestamp
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., place: _Optional[_Union[TaskPlace, str]] = ..., says: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., next: _Optional[str] = ..., next_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[TaskLease, _Mapping]]] = ..., completed_by: _Optional[_Iterable[str]] = ..., failures: _Optional[_Iterable[_Union[TaskFailure, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., worker: _Optional[_Union[WorkerAnswer, _Mapping]] = ..., now: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PauseQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class PauseQueueResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: bool = ...) -> None: ...

class ResumeQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class ResumeQueueResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: bool = ...) -> None: ...

class ListLimitsRequest(_message.Message):
    __slots__ = ("queue", "state", "limit", "cursor")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    queue: str
    state: str
    limit: int
    cursor: str
    def __init__(self, queue: _Optional[str] = ..., state: _Optional[str] = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListLimitsResponse(_message.Message):
    __slots__ = ("limits", "cursor")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.RepeatedCompositeFieldContainer[LimitKey]
    cursor: str
    def __init__(self, limits: _Optional[_Iterable[_Union[LimitKey, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetLimitRequest(_message.Message):
    __slots__ = ("queue", "limit_key")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_KEY_FIELD_NUMBER: _ClassVar[int]
    queue: str
    limit_key: str
    def __init__(self, queue: _Optional[str] = ..., limit_key: _Optional[str] = ...) -> None: ...

class SetLimitRequest(_message.Message):
    __slots__ = ("queue", "limit_key", "at_a_time", "pace", "burst", "hold")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_KEY_FIELD_NUMBER: _ClassVar[int]
    AT_A_TIME_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    BURST_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    queue: str
    limit_key: str
    at_a_time: int
    pace: str
    burst: int
    hold: _duration_pb2.Duration
    def __init__(self, queue: _Optional[str] = ..., limit_key: _Optional[str] = ..., at_a_time: _Optional[int] = ..., pace: _Optional[str] = ..., burst: _Optional[int] = ..., hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ClearLimitRequest(_message.Message):
    __slots__ = ("queue", "limit_key")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_KEY_FIELD_NUMBER: _ClassVar[int]
    queue: str
    limit_key: str
    def __init__(self, queue: _Optional[str] = ..., limit_key: _Optional[str] = ...) -> None: ...

class ClearLimitResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: bool = ...) -> None: ...

class LimitKey(_message.Message):
    __slots__ = ("queue", "limit_key", "running", "waiting", "at_a_time", "pace_ms", "burst", "next_start_at", "held_until", "own")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_KEY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    AT_A_TIME_FIELD_NUMBER: _ClassVar[int]
    PACE_MS_FIELD_NUMBER: _ClassVar[int]
    BURST_FIELD_NUMBER: _ClassVar[int]
    NEXT_START_AT_FIELD_NUMBER: _ClassVar[int]
    HELD_UNTIL_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    queue: str
    limit_key: str
    running: int
    waiting: int
    at_a_time: int
    pace_ms: int
    burst: int
    next_start_at: _timestamp_pb2.Timestamp
    held_until: _timestamp_pb2.Timestamp
    own: OwnLimits
    def __init__(self, queue: _Optional[str] = ..., limit_key: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., at_a_time: _Optional[int] = ..., pace_ms: _Optional[int] = ..., burst: _Optional[int] = ..., next_start_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., held_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., own: _Optional[_Union[OwnLimits, _Mapping]] = ...) -> None: ...

class OwnLimits(_message.Message):
    __slots__ = ("at_a_time", "pace", "burst", "hold_until", "at", "who")
    AT_A_TIME_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    BURST_FIELD_NUMBER: _ClassVar[int]
    HOLD_UNTIL_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    at_a_time: int
    pace: str
    burst: int
    hold_until: _timestamp_pb2.Timestamp
    at: _timestamp_pb2.Timestamp
    who: str
    def __init__(self, at_a_time: _Optional[int] = ..., pace: _Optional[str] = ..., burst: _Optional[int] = ..., hold_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., who: _Optional[str] = ...) -> None: ...

class ChangeTasksRequest(_message.Message):
    __slots__ = ("ids", "priority", "replicas", "filter", "dry_run", "yes")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    priority: Priority
    replicas: int
    filter: TaskFilter
    dry_run: bool
    yes: bool
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., priority: _Optional[_Union[Priority, str]] = ..., replicas: _Optional[int] = ..., filter: _Optional[_Union[TaskFilter, _Mapping]] = ..., dry_run: bool = ..., yes: bool = ...) -> None: ...

class ChangeTasksResponse(_message.Message):
    __slots__ = ("results", "count", "bulk")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    count: TaskCount
    bulk: BulkChange
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., count: _Optional[_Union[TaskCount, _Mapping]] = ..., bulk: _Optional[_Union[BulkChange, _Mapping]] = ...) -> None: ...

class RequeueTasksRequest(_message.Message):
    __slots__ = ("ids", "to", "away_from", "reserved_for", "filter", "dry_run", "yes")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    AWAY_FROM_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FOR_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    to: str
    away_from: str
    reserved_for: _duration_pb2.Duration
    filter: TaskFilter
    dry_run: bool
    yes: bool
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., to: _Optional[str] = ..., away_from: _Optional[str] = ..., reserved_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., filter: _Optional[_Union[TaskFilter, _Mapping]] = ..., dry_run: bool = ..., yes: bool = ...) -> None: ...

class RequeueTasksResponse(_message.Message):
    __slots__ = ("results", "count", "bulk")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    count: TaskCount
    bulk: BulkChange
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., count: _Optional[_Union[TaskCount, _Mapping]] = ..., bulk: _Optional[_Union[BulkChange, _Mapping]] = ...) -> None: ...

class CancelTasksRequest(_message.Message):
    __slots__ = ("ids", "filter", "dry_run", "yes")
    IDS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    filter: TaskFilter
    dry_run: bool
    yes: bool
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[TaskFilter, _Mapping]] = ..., dry_run: bool = ..., yes: bool = ...) -> None: ...

class CancelTasksResponse(_message.Message):
    __slots__ = ("results", "count", "bulk")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    count: TaskCount
    bulk: BulkChange
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., count: _Optional[_Union[TaskCount, _Mapping]] = ..., bulk: _Optional[_Union[BulkChange, _Mapping]] = ...) -> None: ...

class GetTasksRequest(_message.Message):
    __slots__ = ("worker", "queues", "max_tasks", "wait", "lease_duration", "max_bytes", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    MAX_TASKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    queues: _containers.RepeatedScalarFieldContainer[str]
    max_tasks: int
    wait: _duration_pb2.Duration
    lease_duration: _duration_pb2.Duration
    max_bytes: int
    weights: _containers.ScalarMap[str, int]
    def __init__(self, worker: _Optional[str] = ..., queues: _Optional[_Iterable[str]] = ..., max_tasks: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_bytes: _Optional[int] = ..., weights: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LeasedTask(_message.Message):
    __slots__ = ("id", "queue", "key", "payload", "headers", "traceparent", "lease_token", "lease_expires_at", "attempt", "replicas", "priority", "payload_encoding", "limit_key")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ENCODING_FIELD_NUMBER: _ClassVar[int]
    LIMIT_KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    queue: str
    key: bytes
    payload: bytes
    headers: _containers.ScalarMap[str, str]
    traceparent: str
    lease_token: str
    lease_expires_at: _timestamp_pb2.Timestamp
    attempt: int
    replicas: int
    priority: Priority
    payload_encoding: Encoding
    limit_key: str
    def __init__(self, id: _Optional[str] = ..., queue: _Optional[str] = ..., key: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, str]] = ..., traceparent: _Optional[str] = ..., lease_token: _Optional[str] = ..., lease_expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., replicas: _Optional[int] = ..., priority: _Optional[_Union[Priority, str]] = ..., payload_encoding: _Optional[_Union[Encoding, str]] = ..., limit_key: _Optional[str] = ...) -> None: ...

class GetTasksResponse(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[LeasedTask]
    def __init__(self, tasks: _Optional[_Iterable[_Union[LeasedTask, _Mapping]]] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("id", "status", "error", "lease_expires_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    status: ItemStatus
    error: str
    lease_expires_at: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[str] = ..., status: _Optional[_Union[ItemStatus, str]] = ..., error: _Optional[str] = ..., lease_expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class LimitReport(_message.Message):
    __slots__ = ("hold", "pace")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    hold: _duration_pb2.Duration
    pace: _duration_pb2.Duration
    def __init__(self, hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("id", "lease_token", "result", "discovered", "result_encoding", "limit")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DISCOVERED_FIELD_NUMBER: _ClassVar[int]
    RESULT_ENCODING_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease_token: str
    result: bytes
    discovered: _containers.RepeatedCompositeFieldContainer[NewTask]
    result_encoding: Encoding
    limit: LimitReport
    def __init__(self, id: _Optional[str] = ..., lease_token: _Optional[str] = ..., result: _Optional[bytes] = ..., discovered: _Optional[_Iterable[_Union[NewTask, _Mapping]]] = ..., result_encoding: _Optional[_Union[Encoding, str]] = ..., limit: _Optional[_Union[LimitReport, _Mapping]] = ...) -> None: ...

class CompleteTasksRequest(_message.Message):
    __slots__ = ("worker", "completions", "next")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    next: GetTasksRequest
    def __init__(self, worker: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., next: _Optional[_Union[GetTasksRequest, _Mapping]] = ...) -> None: ...

class CompleteTasksResponse(_message.Message):
    __slots__ = ("results", "tasks")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    tasks: _containers.RepeatedCompositeFieldContainer[LeasedTask]
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., tasks: _Optional[_Iterable[_Union[LeasedTask, _Mapping]]] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("id", "lease_token", "reason", "retry", "delay", "not_started", "limit")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    NOT_STARTED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease_token: str
    reason: str
    retry: bool
    delay: _duration_pb2.Duration
    not_started: bool
    limit: LimitReport
    def __init__(self, id: _Optional[str] = ..., lease_token: _Optional[str] = ..., reason: _Optional[str] = ..., retry: bool = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., not_started: bool = ..., limit: _Optional[_Union[LimitReport, _Mapping]] = ...) -> None: ...

class RejectTasksRequest(_message.Message):
    __slots__ = ("worker", "rejections")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    def __init__(self, worker: _Optional[str] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ...) -> None: ...

class RejectTasksResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ...) -> None: ...

class Extension(_message.Message):
    __slots__ = ("id", "lease_token", "by")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    lease_token: str
    by: _duration_pb2.Duration
    def __init__(self, id: _Optional[str] = ..., lease_token: _Optional[str] = ..., by: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ExtendTasksRequest(_message.Message):
    __slots__ = ("worker", "extensions")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    extensions: _containers.RepeatedCompositeFieldContainer[Extension]
    def __init__(self, worker: _Optional[str] = ..., extensions: _Optional[_Iterable[_Union[Extension, _Mapping]]] = ...) -> None: ...

class ExtendTasksResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("worker", "queues", "want", "session", "holding", "takeover", "tells_started", "keep_leases", "timeout", "lease_duration", "max_bytes", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    TELLS_STARTED_FIELD_NUMBER: _ClassVar[int]
    KEEP_LEASES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    queues: _containers.RepeatedScalarFieldContainer[str]
    want: int
    session: str
    holding: _containers.RepeatedScalarFieldContainer[str]
    takeover: bool
    tells_started: bool
    keep_leases: bool
    timeout: _duration_pb2.Duration
    lease_duration: _duration_pb2.Duration
    max_bytes: int
    weights: _containers.ScalarMap[str, int]
    def __init__(self, worker: _Optional[str] = ..., queues: _Optional[_Iterable[str]] = ..., want: _Optional[int] = ..., session: _Optional[str] = ..., holding: _Optional[_Iterable[str]] = ..., takeover: bool = ..., tells_started: bool = ..., keep_leases: bool = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_bytes: _Optional[int] = ..., weights: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("open", "number", "completions", "rejections", "extensions", "started", "surrender", "want", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SURRENDER_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    number: int
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    extensions: _containers.RepeatedCompositeFieldContainer[Extension]
    started: _containers.RepeatedScalarFieldContainer[str]
    surrender: bool
    want: int
    close: bool
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., number: _Optional[int] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ..., extensions: _Optional[_Iterable[_Union[Extension, _Mapping]]] = ..., started: _Optional[_Iterable[str]] = ..., surrender: bool = ..., want: _Optional[int] = ..., close: bool = ...) -> None: ...

class TaskdFrame(_message.Message):
    __slots__ = ("opened", "tasks", "answer", "ended", "closing", "demand")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    tasks: _containers.RepeatedCompositeFieldContainer[LeasedTask]
    answer: FrameAnswer
    ended: _containers.RepeatedCompositeFieldContainer[ItemResult]
    closing: SessionClosing
    demand: int
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., tasks: _Optional[_Iterable[_Union[LeasedTask, _Mapping]]] = ..., answer: _Optional[_Union[FrameAnswer, _Mapping]] = ..., ended: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., closing: _Optional[_Union[SessionClosing, _Mapping]] = ..., demand: _Optional[int] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session", "resumed", "granted", "max_tasks", "heartbeat", "timeout")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    MAX_TASKS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    session: str
    resumed: bool
    granted: int
    max_tasks: int
    heartbeat: _duration_pb2.Duration
    timeout: _duration_pb2.Duration
    def __init__(self, session: _Optional[str] = ..., resumed: bool = ..., granted: _Optional[int] = ..., max_tasks: _Optional[int] = ..., heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FrameAnswer(_message.Message):
    __slots__ = ("number", "completions", "rejections", "extensions", "granted", "surrendered")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    SURRENDERED_FIELD_NUMBER: _ClassVar[int]
    number: int
    completions: _containers.RepeatedCompositeFieldContainer[ItemResult]
    rejections: _containers.RepeatedCompositeFieldContainer[ItemResult]
    extensions: _containers.RepeatedCompositeFieldContainer[ItemResult]
    granted: int
    surrendered: int
    def __init__(self, number: _Optional[int] = ..., completions: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., rejections: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., extensions: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., granted: _Optional[int] = ..., surrendered: _Optional[int] = ...) -> None: ...

class SessionClosing(_message.Message):
    __slots__ = ("reason", "within")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    within: _duration_pb2.Duration
    def __init__(self, reason: _Optional[str] = ..., within: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("worker", "queues", "want", "session", "holding", "takeover", "tells_started", "timeout", "lease_duration", "max_bytes", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    TELLS_STARTED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    queues: _containers.RepeatedScalarFieldContainer[str]
    want: int
    session: str
    holding: _containers.RepeatedScalarFieldContainer[str]
    takeover: bool
    tells_started: bool
    timeout: _duration_pb2.Duration
    lease_duration: _duration_pb2.Duration
    max_bytes: int
    weights: _containers.ScalarMap[str, int]
    def __init__(self, worker: _Optional[str] = ..., queues: _Optional[_Iterable[str]] = ..., want: _Optional[int] = ..., session: _Optional[str] = ..., holding: _Optional[_Iterable[str]] = ..., takeover: bool = ..., tells_started: bool = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_bytes: _Optional[int] = ..., weights: _Optional[_Mapping[str, int]] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "resumed", "granted", "max_tasks", "heartbeat", "timeout")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    MAX_TASKS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    session: str
    resumed: bool
    granted: int
    max_tasks: int
    heartbeat: _duration_pb2.Duration
    timeout: _duration_pb2.Duration
    def __init__(self, session: _Optional[str] = ..., resumed: bool = ..., granted: _Optional[int] = ..., max_tasks: _Optional[int] = ..., heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WantTasksRequest(_message.Message):
    __slots__ = ("worker", "session", "want", "wait")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    session: str
    want: int
    wait: _duration_pb2.Duration
    def __init__(self, worker: _Optional[str] = ..., session: _Optional[str] = ..., want: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WantTasksResponse(_message.Message):
    __slots__ = ("tasks", "granted", "demand", "in_hand")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[LeasedTask]
    granted: int
    demand: int
    in_hand: int
    def __init__(self, tasks: _Optional[_Iterable[_Union[LeasedTask, _Mapping]]] = ..., granted: _Optional[int] = ..., demand: _Optional[int] = ..., in_hand: _Optional[int] = ...) -> None: ...

class SurrenderTasksRequest(_message.Message):
    __slots__ = ("worker", "session")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    session: str
    def __init__(self, worker: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class SurrenderTasksResponse(_message.Message):
    __slots__ = ("surrendered", "in_hand")
    SURRENDERED_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_FIELD_NUMBER: _ClassVar[int]
    surrendered: int
    in_hand: int
    def __init__(self, surrendered: _Optional[int] = ..., in_hand: _Optional[int] = ...) -> None: ...

class GetPendingCountRequest(_message.Message):
    __slots__ = ("worker", "session")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    session: str
    def __init__(self, worker: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class GetPendingCountResponse(_message.Message):
    __slots__ = ("demand", "in_hand")
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_FIELD_NUMBER: _ClassVar[int]
    demand: int
    in_hand: int
    def __init__(self, demand: _Optional[int] = ..., in_hand: _Optional[int] = ...) -> None: ...

class ReportTasksRequest(_message.Message):
    __slots__ = ("worker", "session", "completions", "rejections", "extensions", "started")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    session: str
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    extensions: _containers.RepeatedCompositeFieldContainer[Extension]
    started: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[str] = ..., session: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ..., extensions: _Optional[_Iterable[_Union[Extension, _Mapping]]] = ..., started: _Optional[_Iterable[str]] = ...) -> None: ...

class ReportTasksResponse(_message.Message):
    __slots__ = ("completions", "rejections", "extensions", "counted", "demand", "in_hand")
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    EXTENSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_FIELD_NUMBER: _ClassVar[int]
    completions: _containers.RepeatedCompositeFieldContainer[ItemResult]
    rejections: _containers.RepeatedCompositeFieldContainer[ItemResult]
    extensions: _containers.RepeatedCompositeFieldContainer[ItemResult]
    counted: int
    demand: int
    in_hand: int
    def __init__(self, completions: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., rejections: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., extensions: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., counted: _Optional[int] = ..., demand: _Optional[int] = ..., in_hand: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("worker", "session")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    session: str
    def __init__(self, worker: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("offered", "failed")
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    offered: int
    failed: int
    def __init__(self, offered: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class RetryTasksRequest(_message.Message):
    __slots__ = ("ids", "filter", "dry_run", "yes")
    IDS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    filter: TaskFilter
    dry_run: bool
    yes: bool
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[TaskFilter, _Mapping]] = ..., dry_run: bool = ..., yes: bool = ...) -> None: ...

class TaskCount(_message.Message):
    __slots__ = ("matched", "looked_at", "at_least", "as_of")
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    matched: int
    looked_at: int
    at_least: bool
    as_of: _timestamp_pb2.Timestamp
    def __init__(self, matched: _Optional[int] = ..., looked_at: _Optional[int] = ..., at_least: bool = ..., as_of: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RetryTasksResponse(_message.Message):
    __slots__ = ("results", "count", "bulk")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    count: TaskCount
    bulk: BulkChange
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., count: _Optional[_Union[TaskCount, _Mapping]] = ..., bulk: _Optional[_Union[BulkChange, _Mapping]] = ...) -> None: ...

class BulkChange(_message.Message):
    __slots__ = ("id", "what", "state", "filter", "who", "looked_at", "matched", "changed", "failed", "last_error", "created_at", "updated_at")
    ID_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    what: str
    state: BulkState
    filter: TaskFilter
    who: str
    looked_at: int
    matched: int
    changed: int
    failed: int
    last_error: str
    created_at: _timestamp_pb2.Timestamp
    updated_at: _timestamp_pb2.Timestamp
    def __init__(self, id: _Optional[str] = ..., what: _Optional[str] = ..., state: _Optional[_Union[BulkState, str]] = ..., filter: _Optional[_Union[TaskFilter, _Mapping]] = ..., who: _Optional[str] = ..., looked_at: _Optional[int] = ..., matched: _Optional[int] = ..., changed: _Optional[int] = ..., failed: _Optional[int] = ..., last_error: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., updated_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListBulkChangesRequest(_message.Message):
    __slots__ = ("limit", "before")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    limit: int
    before: str
    def __init__(self, limit: _Optional[int] = ..., before: _Optional[str] = ...) -> None: ...

class ListBulkChangesResponse(_message.Message):
    __slots__ = ("bulk",)
    BULK_FIELD_NUMBER: _ClassVar[int]
    bulk: _containers.RepeatedCompositeFieldContainer[BulkChange]
    def __init__(self, bulk: _Optional[_Iterable[_Union[BulkChange, _Mapping]]] = ...) -> None: ...

class GetBulkChangeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class StopBulkChangeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class LetterFilter(_message.Message):
    __slots__ = ("queue", "kind", "since", "until", "reason")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    queue: str
    kind: LetterKind
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    reason: str
    def __init__(self, queue: _Optional[str] = ..., kind: _Optional[_Union[LetterKind, str]] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("filter", "limit", "cursor")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    filter: LetterFilter
    limit: int
    cursor: str
    def __init__(self, filter: _Optional[_Union[LetterFilter, _Mapping]] = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("letters", "cursor")
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    letters: _containers.RepeatedCompositeFieldContainer[Letter]
    cursor: str
    def __init__(self, letters: _Optional[_Iterable[_Union[Letter, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetDeadLetterRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class LetterAttempt(_message.Message):
    __slots__ = ("at", "worker", "error")
    AT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    worker: str
    error: str
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., worker: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Letter(_message.Message):
    __slots__ = ("id", "kind", "queue", "reason", "at", "attempts", "history", "task", "parent_id", "topic", "partition", "offset", "value")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: LetterKind
    queue: str
    reason: str
    at: _timestamp_pb2.Timestamp
    attempts: int
    history: _containers.RepeatedCompositeFieldContainer[LetterAttempt]
    task: NewTask
    parent_id: str
    topic: str
    partition: int
    offset: str
    value: bytes
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[_Union[LetterKind, str]] = ..., queue: _Optional[str] = ..., reason: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempts: _Optional[int] = ..., history: _Optional[_Iterable[_Union[LetterAttempt, _Mapping]]] = ..., task: _Optional[_Union[NewTask, _Mapping]] = ..., parent_id: _Optional[str] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class CountDeadLettersRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: LetterFilter
    def __init__(self, filter: _Optional[_Union[LetterFilter, _Mapping]] = ...) -> None: ...

class CountDeadLettersResponse(_message.Message):
    __slots__ = ("reasons", "looked_at", "at_least")
    REASONS_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedCompositeFieldContainer[LetterReason]
    looked_at: int
    at_least: bool
    def __init__(self, reasons: _Optional[_Iterable[_Union[LetterReason, _Mapping]]] = ..., looked_at: _Optional[int] = ..., at_least: bool = ...) -> None: ...

class LetterReason(_message.Message):
    __slots__ = ("reason", "prefix", "count", "first_at", "last_at")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_AT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    prefix: str
    count: int
    first_at: _timestamp_pb2.Timestamp
    last_at: _timestamp_pb2.Timestamp
    def __init__(self, reason: _Optional[str] = ..., prefix: _Optional[str] = ..., count: _Optional[int] = ..., first_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ChangeDeadLettersRequest(_message.Message):
    __slots__ = ("ids", "filter", "dry_run", "yes", "limit", "cursor")
    IDS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    filter: LetterFilter
    dry_run: bool
    yes: bool
    limit: int
    cursor: str
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., filter: _Optional[_Union[LetterFilter, _Mapping]] = ..., dry_run: bool = ..., yes: bool = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class LetterFailure(_message.Message):
    __slots__ = ("id", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    error: str
    def __init__(self, id: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ChangeDeadLettersResponse(_message.Message):
    __slots__ = ("matched", "changed", "failed", "cursor")
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    matched: int
    changed: int
    failed: _containers.RepeatedCompositeFieldContainer[LetterFailure]
    cursor: str
    def __init__(self, matched: _Optional[int] = ..., changed: _Optional[int] = ..., failed: _Optional[_Iterable[_Union[LetterFailure, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetQueueRequest(_message.Message):
    __slots__ = ("queue", "wait_drained")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    WAIT_DRAINED_FIELD_NUMBER: _ClassVar[int]
    queue: str
    wait_drained: _duration_pb2.Duration
    def __init__(self, queue: _Optional[str] = ..., wait_drained: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("queue", "pending", "waiting", "assigned", "delayed", "leases", "completed", "dead", "cancelled", "oldest_waiting_ms", "paused", "unread_shards", "drained")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    UNREAD_SHARDS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    queue: str
    pending: int
    waiting: int
    assigned: int
    delayed: int
    leases: int
    completed: int
    dead: int
    cancelled: int
    oldest_waiting_ms: int
    paused: bool
    unread_shards: int
    drained: bool
    def __init__(self, queue: _Optional[str] = ..., pending: _Optional[int] = ..., waiting: _Optional[int] = ..., assigned: _Optional[int] = ..., delayed: _Optional[int] = ..., leases: _Optional[int] = ..., completed: _Optional[int] = ..., dead: _Optional[int] = ..., cancelled: _Optional[int] = ..., oldest_waiting_ms: _Optional[int] = ..., paused: bool = ..., unread_shards: _Optional[int] = ..., drained: bool = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "more", "unread_leases")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    UNREAD_LEASES_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    more: int
    unread_leases: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., more: _Optional[int] = ..., unread_leases: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker", "process", "address", "queues", "since", "last_heard", "in_hand", "done", "failed")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    process: str
    address: str
    queues: _containers.RepeatedScalarFieldContainer[str]
    since: _timestamp_pb2.Timestamp
    last_heard: _timestamp_pb2.Timestamp
    in_hand: int
    done: int
    failed: int
    def __init__(self, worker: _Optional[str] = ..., process: _Optional[str] = ..., address: _Optional[str] = ..., queues: _Optional[_Iterable[str]] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_heard: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., in_hand: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class ListProcessesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListProcessesResponse(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessInfo]
    def __init__(self, processes: _Optional[_Iterable[_Union[ProcessInfo, _Mapping]]] = ...) -> None: ...

class ProcessInfo(_message.Message):
    __slots__ = ("process", "host", "pid", "http", "grpc", "pipelines", "version", "since", "last_heard", "workers")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    process: str
    host: str
    pid: int
    http: str
    grpc: str
    pipelines: _containers.RepeatedScalarFieldContainer[str]
    version: str
    since: _timestamp_pb2.Timestamp
    last_heard: _timestamp_pb2.Timestamp
    workers: int
    def __init__(self, process: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., http: _Optional[str] = ..., grpc: _Optional[str] = ..., pipelines: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_heard: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., workers: _Optional[int] = ...) -> None: ...

class GetBooksRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class Books(_message.Message):
    __slots__ = ("at", "pipeline", "task_results", "rejected_elsewhere", "queues")
    AT_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    TASK_RESULTS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    pipeline: int
    task_results: int
    rejected_elsewhere: int
    queues: _containers.RepeatedCompositeFieldContainer[QueueBooks]
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., pipeline: _Optional[int] = ..., task_results: _Optional[int] = ..., rejected_elsewhere: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[QueueBooks, _Mapping]]] = ...) -> None: ...

class QueueBooks(_message.Message):
    __slots__ = ("queue", "state", "stored", "duplicates", "rejected", "completed", "dead", "cancelled", "held", "fresh", "parked", "scheduled", "missing", "crowded", "behind", "between", "waiting", "behind_limits", "assigned", "delayed", "leases", "reports", "lanes", "lost_shards")
    class LanesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    CROWDED_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BEHIND_LIMITS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARDS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    state: BooksState
    stored: int
    duplicates: int
    rejected: int
    completed: int
    dead: int
    cancelled: int
    held: int
    fresh: int
    parked: int
    scheduled: int
    missing: int
    crowded: int
    behind: int
    between: int
    waiting: int
    behind_limits: int
    assigned: int
    delayed: int
    leases: int
    reports: int
    lanes: _containers.ScalarMap[str, int]
    lost_shards: int
    def __init__(self, queue: _Optional[str] = ..., state: _Optional[_Union[BooksState, str]] = ..., stored: _Optional[int] = ..., duplicates: _Optional[int] = ..., rejected: _Optional[int] = ..., completed: _Optional[int] = ..., dead: _Optional[int] = ..., cancelled: _Optional[int] = ..., held: _Optional[int] = ..., fresh: _Optional[int] = ..., parked: _Optional[int] = ..., scheduled: _Optional[int] = ..., missing: _Optional[int] = ..., crowded: _Optional[int] = ..., behind: _Optional[int] = ..., between: _Optional[int] = ..., waiting: _Optional[int] = ..., behind_limits: _Optional[int] = ..., assigned: _Optional[int] = ..., delayed: _Optional[int] = ..., leases: _Optional[int] = ..., reports: _Optional[int] = ..., lanes: _Optional[_Mapping[str, int]] = ..., lost_shards: _Optional[int] = ...) -> None: ...

class FsckRequest(_message.Message):
    __slots__ = ("queue", "repair", "cursor")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    queue: str
    repair: bool
    cursor: str
    def __init__(self, queue: _Optional[str] = ..., repair: bool = ..., cursor: _Optional[str] = ...) -> None: ...

class FsckFind(_message.Message):
    __slots__ = ("kind", "queue", "shard", "task_id", "says", "repair", "mended")
    KIND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    MENDED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    queue: str
    shard: int
    task_id: str
    says: str
    repair: str
    mended: bool
    def __init__(self, kind: _Optional[str] = ..., queue: _Optional[str] = ..., shard: _Optional[int] = ..., task_id: _Optional[str] = ..., says: _Optional[str] = ..., repair: _Optional[str] = ..., mended: bool = ...) -> None: ...

class FsckResponse(_message.Message):
    __slots__ = ("finds", "shards", "tasks", "cursor", "more", "unchecked", "unchecked_shards")
    FINDS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    UNCHECKED_FIELD_NUMBER: _ClassVar[int]
    UNCHECKED_SHARDS_FIELD_NUMBER: _ClassVar[int]
    finds: _containers.RepeatedCompositeFieldContainer[FsckFind]
    shards: int
    tasks: int
    cursor: str
    more: int
    unchecked: int
    unchecked_shards: _containers.RepeatedCompositeFieldContainer[UncheckedShard]
    def __init__(self, finds: _Optional[_Iterable[_Union[FsckFind, _Mapping]]] = ..., shards: _Optional[int] = ..., tasks: _Optional[int] = ..., cursor: _Optional[str] = ..., more: _Optional[int] = ..., unchecked: _Optional[int] = ..., unchecked_shards: _Optional[_Iterable[_Union[UncheckedShard, _Mapping]]] = ...) -> None: ...

class UncheckedShard(_message.Message):
    __slots__ = ("queue", "shard", "says")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    shard: int
    says: str
    def __init__(self, queue: _Optional[str] = ..., shard: _Optional[int] = ..., says: _Optional[str] = ...) -> None: ...

class ListActsRequest(_message.Message):
    __slots__ = ("before", "limit")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    before: str
    limit: int
    def __init__(self, before: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListActsResponse(_message.Message):
    __slots__ = ("acts",)
    ACTS_FIELD_NUMBER: _ClassVar[int]
    acts: _containers.RepeatedCompositeFieldContainer[Act]
    def __init__(self, acts: _Optional[_Iterable[_Union[Act, _Mapping]]] = ...) -> None: ...

class Act(_message.Message):
    __slots__ = ("id", "at", "who", "what", "on")
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    id: str
    at: _timestamp_pb2.Timestamp
    who: str
    what: str
    on: str
    def __init__(self, id: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., who: _Optional[str] = ..., what: _Optional[str] = ..., on: _Optional[str] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[Topic]
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping]]] = ...) -> None: ...

class GetTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class PutTopicRequest(_message.Message):
    __slots__ = ("topic", "partitions", "retention_age", "retention_records", "retention_bytes", "attached")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_AGE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_RECORDS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partitions: int
    retention_age: _duration_pb2.Duration
    retention_records: int
    retention_bytes: int
    attached: bool
    def __init__(self, topic: _Optional[str] = ..., partitions: _Optional[int] = ..., retention_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retention_records: _Optional[int] = ..., retention_bytes: _Optional[int] = ..., attached: bool = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class DeleteTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Topic(_message.Message):
    __slots__ = ("name", "partitions", "retention_age", "retention_records", "retention_bytes", "created_at", "offsets", "attached")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_AGE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_RECORDS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    name: str
    partitions: int
    retention_age: _duration_pb2.Duration
    retention_records: int
    retention_bytes: int
    created_at: _timestamp_pb2.Timestamp
    offsets: _containers.RepeatedCompositeFieldContainer[PartitionOffsets]
    attached: bool
    def __init__(self, name: _Optional[str] = ..., partitions: _Optional[int] = ..., retention_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retention_records: _Optional[int] = ..., retention_bytes: _Optional[int] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., offsets: _Optional[_Iterable[_Union[PartitionOffsets, _Mapping]]] = ..., attached: bool = ...) -> None: ...

class PartitionOffsets(_message.Message):
    __slots__ = ("partition", "first", "last")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    partition: int
    first: str
    last: str
    def __init__(self, partition: _Optional[int] = ..., first: _Optional[str] = ..., last: _Optional[str] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class NewRecord(_message.Message):
    __slots__ = ("value", "key", "attributes", "id")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    key: bytes
    attributes: _containers.RepeatedCompositeFieldContainer[Attribute]
    id: str
    def __init__(self, value: _Optional[bytes] = ..., key: _Optional[bytes] = ..., attributes: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ..., id: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("topic", "records")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    records: _containers.RepeatedCompositeFieldContainer[NewRecord]
    def __init__(self, topic: _Optional[str] = ..., records: _Optional[_Iterable[_Union[NewRecord, _Mapping]]] = ...) -> None: ...

class PublishResult(_message.Message):
    __slots__ = ("status", "partition", "offset", "error")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    status: PublishStatus
    partition: int
    offset: str
    error: str
    def __init__(self, status: _Optional[_Union[PublishStatus, str]] = ..., partition: _Optional[int] = ..., offset: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PublishResult]
    def __init__(self, results: _Optional[_Iterable[_Union[PublishResult, _Mapping]]] = ...) -> None: ...

class ReadTopicRequest(_message.Message):
    __slots__ = ("topic", "partition", "limit", "wait")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    limit: int
    wait: _duration_pb2.Duration
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., limit: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., **kwargs) -> None: ...

class TopicRecord(_message.Message):
    __slots__ = ("partition", "offset", "published_at", "value", "key", "attributes", "id")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    partition: int
    offset: str
    published_at: _timestamp_pb2.Timestamp
    value: bytes
    key: bytes
    attributes: _containers.RepeatedCompositeFieldContainer[Attribute]
    id: str
    def __init__(self, partition: _Optional[int] = ..., offset: _Optional[str] = ..., published_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., value: _Optional[bytes] = ..., key: _Optional[bytes] = ..., attributes: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ..., id: _Optional[str] = ...) -> None: ...

class ReadTopicResponse(_message.Message):
    __slots__ = ("records", "next")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[TopicRecord]
    next: str
    def __init__(self, records: _Optional[_Iterable[_Union[TopicRecord, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class FollowTopicRequest(_message.Message):
    __slots__ = ("topic", "partition")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., **kwargs) -> None: ...

class FollowTopicResponse(_message.Message):
    __slots__ = ("records", "next")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[TopicRecord]
    next: str
    def __init__(self, records: _Optional[_Iterable[_Union[TopicRecord, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class ExplainRecordRequest(_message.Message):
    __slots__ = ("topic", "partition", "offset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[str] = ...) -> None: ...

class RecordExplanation(_message.Message):
    __slots__ = ("topic", "partition", "offset", "published_at", "subscriptions")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: str
    published_at: _timestamp_pb2.Timestamp
    subscriptions: _containers.RepeatedCompositeFieldContainer[RecordOfSubscription]
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[str] = ..., published_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., subscriptions: _Optional[_Iterable[_Union[RecordOfSubscription, _Mapping]]] = ...) -> None: ...

class RecordOfSubscription(_message.Message):
    __slots__ = ("subscription", "queue", "fate", "task", "status", "letter", "says")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LETTER_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    queue: str
    fate: RecordFate
    task: str
    status: TaskStatus
    letter: str
    says: str
    def __init__(self, subscription: _Optional[str] = ..., queue: _Optional[str] = ..., fate: _Optional[_Union[RecordFate, str]] = ..., task: _Optional[str] = ..., status: _Optional[_Union[TaskStatus, str]] = ..., letter: _Optional[str] = ..., says: _Optional[str] = ...) -> None: ...

class ListSubscriptionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions",)
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[Subscription]
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[Subscription, _Mapping]]] = ...) -> None: ...

class PutSubscriptionRequest(_message.Message):
    __slots__ = ("subscription", "topic", "queue", "start", "match_json", "sequence", "on_dead")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MATCH_JSON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ON_DEAD_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    topic: str
    queue: str
    start: str
    match_json: str
    sequence: str
    on_dead: str
    def __init__(self, subscription: _Optional[str] = ..., topic: _Optional[str] = ..., queue: _Optional[str] = ..., start: _Optional[str] = ..., match_json: _Optional[str] = ..., sequence: _Optional[str] = ..., on_dead: _Optional[str] = ...) -> None: ...

class GetSubscriptionRequest(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    def __init__(self, subscription: _Optional[str] = ...) -> None: ...

class DeleteSubscriptionRequest(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    def __init__(self, subscription: _Optional[str] = ...) -> None: ...

class DeleteSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SeekRequest(_message.Message):
    __slots__ = ("subscription", "to", "cancel")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    to: str
    cancel: bool
    def __init__(self, subscription: _Optional[str] = ..., to: _Optional[str] = ..., cancel: bool = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("name", "topic", "queue", "start", "match_json", "sequence", "on_dead", "created_at", "behind", "oldest_seconds", "waiting", "leased", "done", "dead", "tasks", "counts", "positions", "bulk")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MATCH_JSON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ON_DEAD_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    queue: str
    start: str
    match_json: str
    sequence: str
    on_dead: str
    created_at: _timestamp_pb2.Timestamp
    behind: int
    oldest_seconds: int
    waiting: int
    leased: int
    done: int
    dead: int
    tasks: int
    counts: ReadCounts
    positions: _containers.RepeatedCompositeFieldContainer[SubscriptionPosition]
    bulk: str
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., queue: _Optional[str] = ..., start: _Optional[str] = ..., match_json: _Optional[str] = ..., sequence: _Optional[str] = ..., on_dead: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., behind: _Optional[int] = ..., oldest_seconds: _Optional[int] = ..., waiting: _Optional[int] = ..., leased: _Optional[int] = ..., done: _Optional[int] = ..., dead: _Optional[int] = ..., tasks: _Optional[int] = ..., counts: _Optional[_Union[ReadCounts, _Mapping]] = ..., positions: _Optional[_Iterable[_Union[SubscriptionPosition, _Mapping]]] = ..., bulk: _Optional[str] = ...) -> None: ...

class ReadCounts(_message.Message):
    __slots__ = ("read", "duplicates", "filtered", "refused", "skipped")
    READ_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    read: int
    duplicates: int
    filtered: int
    refused: int
    skipped: int
    def __init__(self, read: _Optional[int] = ..., duplicates: _Optional[int] = ..., filtered: _Optional[int] = ..., refused: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class SubscriptionPosition(_message.Message):
    __slots__ = ("topic", "partition", "offset", "replay", "behind", "counts")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: str
    replay: int
    behind: int
    counts: ReadCounts
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[str] = ..., replay: _Optional[int] = ..., behind: _Optional[int] = ..., counts: _Optional[_Union[ReadCounts, _Mapping]] = ...) -> None: ...

class Tree(_message.Message):
    __slots__ = ("id", "queue", "state", "epoch", "tasks", "open", "held", "completed", "dead", "cancelled", "letters", "late", "cancelling", "on_dead", "then", "deadline", "opened_at", "ended_at", "queues", "at_least", "waits_for", "reasons", "joins")
    ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    CANCELLING_FIELD_NUMBER: _ClassVar[int]
    ON_DEAD_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    OPENED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    id: str
    queue: str
    state: TreeState
    epoch: int
    tasks: int
    open: int
    held: int
    completed: int
    dead: int
    cancelled: int
    letters: int
    late: int
    cancelling: bool
    on_dead: TreeOnDead
    then: str
    deadline: _timestamp_pb2.Timestamp
    opened_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    queues: _containers.RepeatedCompositeFieldContainer[TreeQueue]
    at_least: bool
    waits_for: _containers.RepeatedCompositeFieldContainer[Task]
    reasons: _containers.RepeatedCompositeFieldContainer[TreeReason]
    joins: int
    def __init__(self, id: _Optional[str] = ..., queue: _Optional[str] = ..., state: _Optional[_Union[TreeState, str]] = ..., epoch: _Optional[int] = ..., tasks: _Optional[int] = ..., open: _Optional[int] = ..., held: _Optional[int] = ..., completed: _Optional[int] = ..., dead: _Optional[int] = ..., cancelled: _Optional[int] = ..., letters: _Optional[int] = ..., late: _Optional[int] = ..., cancelling: bool = ..., on_dead: _Optional[_Union[TreeOnDead, str]] = ..., then: _Optional[str] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., opened_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., queues: _Optional[_Iterable[_Union[TreeQueue, _Mapping]]] = ..., at_least: bool = ..., waits_for: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., reasons: _Optional[_Iterable[_Union[TreeReason, _Mapping]]] = ..., joins: _Optional[int] = ...) -> None: ...

class TreeReason(_message.Message):
    __slots__ = ("task", "says", "next")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    task: str
    says: str
    next: str
    def __init__(self, task: _Optional[str] = ..., says: _Optional[str] = ..., next: _Optional[str] = ...) -> None: ...

class TreeQueue(_message.Message):
    __slots__ = ("queue", "unfinished", "completed", "dead", "cancelled")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    queue: str
    unfinished: int
    completed: int
    dead: int
    cancelled: int
    def __init__(self, queue: _Optional[str] = ..., unfinished: _Optional[int] = ..., completed: _Optional[int] = ..., dead: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...

class ListTreesRequest(_message.Message):
    __slots__ = ("queue", "state", "since", "limit", "cursor")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    queue: str
    state: TreeState
    since: _timestamp_pb2.Timestamp
    limit: int
    cursor: str
    def __init__(self, queue: _Optional[str] = ..., state: _Optional[_Union[TreeState, str]] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListTreesResponse(_message.Message):
    __slots__ = ("trees", "cursor")
    TREES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedCompositeFieldContainer[Tree]
    cursor: str
    def __init__(self, trees: _Optional[_Iterable[_Union[Tree, _Mapping]]] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetTreeRequest(_message.Message):
    __slots__ = ("id", "wait")
    ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    id: str
    wait: _duration_pb2.Duration
    def __init__(self, id: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchTreeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class CancelTreeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RetryTreeRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("name", "version", "applied_by", "applied_at", "text", "on_dead", "timeout", "then", "stages", "error", "max_open", "open", "feeds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_BY_FIELD_NUMBER: _ClassVar[int]
    APPLIED_AT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ON_DEAD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    applied_by: str
    applied_at: _timestamp_pb2.Timestamp
    text: str
    on_dead: TreeOnDead
    timeout: _duration_pb2.Duration
    then: str
    stages: _containers.RepeatedCompositeFieldContainer[TopologyStage]
    error: str
    max_open: int
    open: int
    feeds: _containers.RepeatedCompositeFieldContainer[TopologyFeed]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., applied_by: _Optional[str] = ..., applied_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., text: _Optional[str] = ..., on_dead: _Optional[_Union[TreeOnDead, str]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., then: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[TopologyStage, _Mapping]]] = ..., error: _Optional[str] = ..., max_open: _Optional[int] = ..., open: _Optional[int] = ..., feeds: _Optional[_Iterable[_Union[TopologyFeed, _Mapping]]] = ...) -> None: ...

class TopologyFeed(_message.Message):
    __slots__ = ("name", "type", "reads", "into", "ack", "trees", "duplicates", "refused", "acknowledged", "acks_pending", "held")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    ACKS_PENDING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    reads: str
    into: str
    ack: str
    trees: int
    duplicates: int
    refused: int
    acknowledged: int
    acks_pending: int
    held: str
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., reads: _Optional[str] = ..., into: _Optional[str] = ..., ack: _Optional[str] = ..., trees: _Optional[int] = ..., duplicates: _Optional[int] = ..., refused: _Optional[int] = ..., acknowledged: _Optional[int] = ..., acks_pending: _Optional[int] = ..., held: _Optional[str] = ...) -> None: ...

class TopologyStage(_message.Message):
    __slots__ = ("name", "queue", "start", "lease", "max_attempts", "priority", "edges", "join", "topic")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    name: str
    queue: str
    start: bool
    lease: _duration_pb2.Duration
    max_attempts: int
    priority: Priority
    edges: _containers.RepeatedCompositeFieldContainer[TopologyEdge]
    join: str
    topic: str
    def __init__(self, name: _Optional[str] = ..., queue: _Optional[str] = ..., start: bool = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_attempts: _Optional[int] = ..., priority: _Optional[_Union[Priority, str]] = ..., edges: _Optional[_Iterable[_Union[TopologyEdge, _Mapping]]] = ..., join: _Optional[str] = ..., topic: _Optional[str] = ...) -> None: ...

class TopologyEdge(_message.Message):
    __slots__ = ("port", "to", "match")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    port: str
    to: str
    match: str
    def __init__(self, port: _Optional[str] = ..., to: _Optional[str] = ..., match: _Optional[str] = ...) -> None: ...

class ListTopologiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopologiesResponse(_message.Message):
    __slots__ = ("topologies",)
    TOPOLOGIES_FIELD_NUMBER: _ClassVar[int]
    topologies: _containers.RepeatedCompositeFieldContainer[Topology]
    def __init__(self, topologies: _Optional[_Iterable[_Union[Topology, _Mapping]]] = ...) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ApplyTopologyRequest(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class DeleteTopologyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTopologyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
