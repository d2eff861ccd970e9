package taskd

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/taskd/taskd/clients/go/taskdpb"
)

// Record is a record to publish to a topic.
type Record struct {
	// Value is sent as JSON; a string as text, and a []byte as it is.
	Value any
	// Key keeps records with the same key in order.
	Key string
	// Attributes are texts by name; a name may have several.
	Attributes map[string][]string
	// ID is what tells a repeat from another record.
	ID string
}

// The answers to a record that was published. The topic has a stored one, a rejected one is invalid; what is to be sent
// again may be stored or not.
const (
	Stored          = taskdpb.PublishStatus_PUBLISH_STATUS_STORED
	RecordRejected  = taskdpb.PublishStatus_PUBLISH_STATUS_REJECTED
	PublishTryLater = taskdpb.PublishStatus_PUBLISH_STATUS_TRY_LATER
)

const (
	// mostRecords is what taskd takes in a call.
	mostRecords = 1000
	// mostRecordBytes are those of a call of several records. taskd takes 32 MiB, unless its settings say less.
	mostRecordBytes = 4 << 20
)

// Publish publishes records to a topic, in calls of up to 1,000 and about 4 MiB, and answers record by record, in their
// order. A call whose answer was lost is sent again, so a record may be there twice: give it an ID by which readers can
// tell.
//
// After a call with a [PublishTryLater] no other one is made, and all further records have that answer: so records of a
// key keep their order if they are published again. With an error come the answers to the calls before it.
func (c *Client) Publish(ctx context.Context, topic string, records []Record) ([]*taskdpb.PublishResult, error) {
	messages := make([]*taskdpb.NewRecord, 0, len(records))
	for _, record := range records {
		message, err := record.message()
		if err != nil {
			return nil, err
		}
		messages = append(messages, message)
	}
	results := make([]*taskdpb.PublishResult, 0, len(records))
	most := mostRecords
	for len(results) < len(messages) {
		some := firstRecords(messages[len(results):], most)
		request := &taskdpb.PublishRequest{Topic: topic, Records: some}
		answer, err := taskdpb.NewTopicsClient(c.Conn()).Publish(ctx, request)
		switch {
		case isOfItems(err) && len(some) > 1:
			// taskd takes fewer at once, or one of them is to blame.
			most = len(some) / 2
			continue
		case isOfItems(err) && len(results) > 0:
			results = append(results, &taskdpb.PublishResult{Status: RecordRejected, Error: err.Error()})
			most = mostRecords
			continue
		case err != nil:
			return results, err
		}
		isStored := len(answer.Results) == len(some)
		for n, result := range answer.Results {
			if n < len(some) {
				results = append(results, result)
				isStored = isStored && result.Status != PublishTryLater
			}
		}
		if !isStored {
			break
		}
	}
	for len(results) < len(messages) {
		later := &taskdpb.PublishResult{Status: PublishTryLater, Error: "a record before it was not stored"}
		results = append(results, later)
	}
	return results, nil
}

// firstRecords returns the first ones that go in one call, at least one.
func firstRecords(records []*taskdpb.NewRecord, most int) []*taskdpb.NewRecord {
	count := 0
	bytes := 0
	for count < len(records) && count < most {
		bytes += proto.Size(records[count])
		if count > 0 && bytes > mostRecordBytes {
			break
		}
		count++
	}
	return records[:count]
}

func (r Record) message() (*taskdpb.NewRecord, error) {
	value, _, err := encode(r.Value)
	if err != nil {
		return nil, fmt.Errorf("the value of record %q: %w", r.Key, err)
	}
	message := &taskdpb.NewRecord{Value: value, Key: []byte(r.Key), Id: r.ID}
	for name, values := range r.Attributes {
		for _, value := range values {
			message.Attributes = append(message.Attributes, &taskdpb.Attribute{Name: name, Value: value})
		}
	}
	return message, nil
}
