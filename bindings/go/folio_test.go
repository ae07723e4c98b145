package folio

import (
	"errors"
	"math"
	"math/rand"
	"strings"
	"testing"
)

var config = Config{NumQHeads: 4, NumKvHeads: 2, HeadDim: 32, PageSize: 16, NumPages: 8}

// step is a decode of three requests over random keys and values.
type step struct {
	layer  *Layer
	cache  *Cache
	batch  Batch
	q, out Floats
}

func newStep(t *testing.T) *step {
	t.Helper()
	layer, err := NewLayer(config, 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(layer.Close)
	cache, err := layer.NewCache()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cache.Free)
	s := &step{layer: layer, cache: cache}
	s.batch = Batch{KvLen: []int32{5, 33, 18}, Pages: [][]int32{{4}, {6, 1, 3}, {0, 7}}}
	for _, array := range []*Floats{&s.q, &s.out} {
		if *array, err = NewFloats(3 * config.NumQHeads * config.HeadDim); err != nil {
			t.Fatal(err)
		}
		t.Cleanup((*array).Free)
	}
	random := rand.New(rand.NewSource(1))
	for _, array := range []Floats{cache.K, cache.V, s.q} {
		for i := range array {
			array[i] = 2*random.Float32() - 1
		}
	}
	for i := range s.out {
		s.out[i] = -7
	}
	return s
}

// naive is softmax attention of one query head, in float64.
func (s *step) naive(request, head int) []float64 {
	begin := func(token int) int {
		page := int(s.batch.Pages[request][token/config.PageSize])
		slot := page*config.PageSize + token%config.PageSize
		return (slot*config.NumKvHeads + head*config.NumKvHeads/config.NumQHeads) * config.HeadDim
	}
	q := s.q[(request*config.NumQHeads+head)*config.HeadDim:]
	logits := make([]float64, s.batch.KvLen[request])
	largest := math.Inf(-1)
	for token := range logits {
		for d := 0; d < config.HeadDim; d++ {
			logits[token] += float64(q[d]) * float64(s.cache.K[begin(token)+d])
		}
		logits[token] /= math.Sqrt(float64(config.HeadDim))
		largest = math.Max(largest, logits[token])
	}
	out, sum := make([]float64, config.HeadDim), 0.0
	for token, logit := range logits {
		weight := math.Exp(logit - largest)
		sum += weight
		for d := range out {
			out[d] += weight * float64(s.cache.V[begin(token)+d])
		}
	}
	for d := range out {
		out[d] /= sum
	}
	return out
}

func TestDecode(t *testing.T) {
	s := newStep(t)
	if err := s.layer.Decode(s.cache, s.batch, s.q, s.out); err != nil {
		t.Fatal(err)
	}
	for request := range s.batch.KvLen {
		for head := 0; head < config.NumQHeads; head++ {
			for d, expected := range s.naive(request, head) {
				got := float64(s.out[(request*config.NumQHeads+head)*config.HeadDim+d])
				// float32 sums of 32 products and of 33 weighted values, all below 1.
				if math.Abs(got-expected) > 1e-5 {
					t.Fatalf("request %d, head %d, component %d: %v, not %v", request, head, d, got, expected)
				}
			}
		}
	}
	if name, err := s.layer.KernelName(); err != nil || name == "" {
		t.Fatal(name, err)
	}
	if Version() == "" {
		t.Fatal("no version")
	}
}

func TestRefusalsSayWhyAndWriteNothing(t *testing.T) {
	s := newStep(t)
	expect := func(err error, text string) {
		t.Helper()
		var refusal *Error
		if !errors.As(err, &refusal) || refusal.Status != InvalidArgument || !strings.Contains(err.Error(), text) {
			t.Fatalf("%q is expected in %v", text, err)
		}
	}
	for _, page := range []int32{8, -1, math.MaxInt32} {
		bad := Batch{KvLen: s.batch.KvLen, Pages: [][]int32{{4}, {6, page, 3}, {0, 7}}}
		expect(s.layer.Decode(s.cache, bad, s.q, s.out), "the cache has 8 pages")
	}
	short := Batch{KvLen: s.batch.KvLen, Pages: [][]int32{{4}, {6, 1}, {0, 7}}}
	expect(s.layer.Decode(s.cache, short, s.q, s.out), "row 1")
	expect(s.layer.Decode(s.cache, Batch{KvLen: []int32{-1, 1, 1}, Pages: s.batch.Pages}, s.q, s.out), "-1")
	expect(s.layer.Decode(s.cache, Batch{KvLen: []int32{1}, Pages: s.batch.Pages}, s.q, s.out), "1 requests have 3 rows")
	expect(s.layer.Decode(s.cache, s.batch, s.q[1:], s.out), "q has 383 floats")
	for _, value := range s.out {
		if value != -7 {
			t.Fatal("a refused call has written")
		}
	}
	if _, err := NewLayer(Config{NumQHeads: 3, NumKvHeads: 2, HeadDim: 32, PageSize: 16}, 1); err == nil {
		t.Fatal("3 query heads over 2 KV heads")
	}
	if _, err := NewFloats(0); err == nil {
		t.Fatal("no floats")
	}
}
