// Package folio is an example of Folio's C API from Go: a decode step of one layer over a paged cache in Go's memory.
//
// It is built with cgo, and finds the installed library by pkg-config (PKG_CONFIG_PATH, LD_LIBRARY_PATH).
package folio

/*
#cgo pkg-config: folio
#include <stdlib.h>
#include <folio/c/folio.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// Error is a failed call: the C API's status and its message.
type Error struct {
	Status  int
	Message string
}

func (e *Error) Error() string { return e.Message }

// The statuses that callers tell apart; folio/c/types.h has all of them.
const (
	InvalidArgument = int(C.FOLIO_INVALID_ARGUMENT)
	Unsupported     = int(C.FOLIO_UNSUPPORTED)
	StalePlan       = int(C.FOLIO_STALE_PLAN)
)

// call runs one function of the C API and reads its message on the same thread: goroutines move between threads.
func call(function func() C.folio_status) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if status := function(); status != C.FOLIO_OK {
		return &Error{int(status), C.GoString(C.folio_last_error())}
	}
	return nil
}

// Version is the linked library's, "major.minor.patch".
func Version() string { return C.GoString(C.folio_version()) }

// Config is causal attention over NHD pages of float32.
type Config struct {
	NumQHeads, NumKvHeads, HeadDim, PageSize, NumPages int
}

// Layer is a context, a kernel for the configuration and the memory of its plans. One goroutine at a time.
type Layer struct {
	config    Config
	context   *C.folio_context
	op        *C.folio_op
	buffer    *C.folio_plan_buffer
	workspace unsafe.Pointer
	bytes     C.size_t
}

// NewLayer prepares a kernel on numThreads threads (0: all). Close frees it.
func NewLayer(config Config, numThreads int) (*Layer, error) {
	layer := &Layer{config: config}
	var options C.folio_context_options
	var attention C.folio_attention_config
	steps := []func() C.folio_status{
		func() C.folio_status { return C.folio_context_options_init(&options, C.sizeof_folio_context_options) },
		func() C.folio_status {
			options.num_threads = C.int32_t(numThreads)
			return C.folio_create_cpu_context(&options, &layer.context)
		},
		func() C.folio_status {
			return C.folio_attention_config_init(&attention, C.sizeof_folio_attention_config)
		},
		func() C.folio_status {
			attention.num_q_heads = C.int32_t(config.NumQHeads)
			attention.num_kv_heads = C.int32_t(config.NumKvHeads)
			attention.head_dim_qk = C.int32_t(config.HeadDim)
			attention.head_dim_v = C.int32_t(config.HeadDim)
			attention.q = C.FOLIO_DTYPE_FLOAT32
			attention.kv = C.FOLIO_DTYPE_FLOAT32
			attention.page_size = C.int32_t(config.PageSize)
			return C.folio_prepare(layer.context, &attention, nil, &layer.op)
		},
		func() C.folio_status { return C.folio_create_plan_buffer(layer.op, &layer.buffer) },
		func() C.folio_status { return C.folio_workspace_size(layer.op, &layer.bytes) },
	}
	for _, step := range steps {
		if err := call(step); err != nil {
			layer.Close()
			return nil, err
		}
	}
	// A multiple of 256, as aligned_alloc wants; 0 is a size too.
	layer.workspace = C.aligned_alloc(256, layer.bytes+256)
	if layer.workspace == nil {
		layer.Close()
		return nil, errors.New("no memory for the workspace")
	}
	if err := call(func() C.folio_status {
		return C.folio_init_workspace(layer.op, layer.workspace, layer.bytes, nil)
	}); err != nil {
		layer.Close()
		return nil, err
	}
	return layer, nil
}

// Close frees the layer's handles. It may be called twice.
func (l *Layer) Close() {
	C.folio_free_plan_buffer(l.buffer)
	C.folio_free_op(l.op)
	C.folio_free_context(l.context)
	C.free(l.workspace)
	*l = Layer{}
}

// KernelName says which kernel runs.
func (l *Layer) KernelName() (string, error) {
	var name *C.char
	err := call(func() C.folio_status { return C.folio_kernel_name(l.op, &name) })
	return C.GoString(name), err
}

// Floats are in C's memory, because structures that C reads may not point to Go's. Free gives them back.
type Floats []float32

// NewFloats gives count zeros, at least one.
func NewFloats(count int) (Floats, error) {
	if count <= 0 {
		return nil, fmt.Errorf("an array of %d floats was asked for", count)
	}
	memory := C.calloc(C.size_t(count), 4)
	if memory == nil {
		return nil, fmt.Errorf("no memory for %d floats", count)
	}
	return unsafe.Slice((*float32)(memory), count), nil
}

// Free gives the memory back; the slice must not be used any more.
func (f Floats) Free() {
	if len(f) > 0 {
		C.free(unsafe.Pointer(&f[0]))
	}
}

// Cache is one layer's keys and values, [page][token][head][dim].
type Cache struct{ K, V Floats }

// NewCache gives a cache of zeros.
func (l *Layer) NewCache() (*Cache, error) {
	count := l.config.NumPages * l.config.PageSize * l.config.NumKvHeads * l.config.HeadDim
	k, err := NewFloats(count)
	if err != nil {
		return nil, err
	}
	v, err := NewFloats(count)
	if err != nil {
		k.Free()
		return nil, err
	}
	return &Cache{k, v}, nil
}

// Free gives the cache's memory back.
func (c *Cache) Free() {
	c.K.Free()
	c.V.Free()
	*c = Cache{}
}

// Batch is a decode step: the tokens and the pages of every request.
type Batch struct {
	KvLen []int32   // tokens of each request, the new one's included
	Pages [][]int32 // their pages, in order
}

// ints copies an array into C's memory.
func ints(values []int32) *C.int32_t {
	memory := (*C.int32_t)(C.malloc(C.size_t(4*len(values) + 4)))
	for i, value := range values {
		*(*C.int32_t)(unsafe.Add(unsafe.Pointer(memory), 4*i)) = C.int32_t(value)
	}
	return memory
}

// Decode attends with one query a request: q and out [requests][NumQHeads][HeadDim]. Every page id is checked first.
func (l *Layer) Decode(cache *Cache, batch Batch, q, out Floats) error {
	requests := len(batch.KvLen)
	size := requests * l.config.NumQHeads * l.config.HeadDim
	if len(batch.Pages) != requests {
		return &Error{InvalidArgument, fmt.Sprintf("%d requests have %d rows of pages", requests, len(batch.Pages))}
	}
	if len(q) != size || len(out) != size || size == 0 {
		return &Error{InvalidArgument, fmt.Sprintf("q has %d floats and out %d; both must have %d, above 0", len(q), len(out), size)}
	}
	cuQ, indptr, pages := []int32{0}, []int32{0}, []int32{}
	for r, row := range batch.Pages {
		cuQ = append(cuQ, int32(r+1))
		pages = append(pages, row...)
		indptr = append(indptr, int32(len(pages)))
	}
	lens, cCuQ, cIndptr, cPages := ints(batch.KvLen), ints(cuQ), ints(indptr), ints(pages)
	defer C.free(unsafe.Pointer(lens))
	defer C.free(unsafe.Pointer(cCuQ))
	defer C.free(unsafe.Pointer(cIndptr))
	defer C.free(unsafe.Pointer(cPages))
	// Structures that others point to are in C's memory too.
	segment := (*C.folio_kv_segment)(C.calloc(1, C.sizeof_folio_kv_segment))
	defer C.free(unsafe.Pointer(segment))
	place := (*C.folio_segment_args)(C.calloc(1, C.sizeof_folio_segment_args))
	defer C.free(unsafe.Pointer(place))

	var step C.folio_batch
	var args C.folio_attention_args
	var plan C.folio_plan
	shape := C.folio_kv_cache_shape{
		num_pages: C.int64_t(l.config.NumPages), page_size: C.int32_t(l.config.PageSize),
		num_kv_heads: C.int32_t(l.config.NumKvHeads), head_dim_qk: C.int32_t(l.config.HeadDim),
		head_dim_v: C.int32_t(l.config.HeadDim), dtype: C.FOLIO_DTYPE_FLOAT32,
	}
	sizes := [3]C.int64_t{C.int64_t(requests), C.int64_t(l.config.NumQHeads), C.int64_t(l.config.HeadDim)}
	steps := []func() C.folio_status{
		func() C.folio_status { return C.folio_kv_segment_init(segment, C.sizeof_folio_kv_segment) },
		func() C.folio_status { return C.folio_batch_init(&step, C.sizeof_folio_batch) },
		func() C.folio_status { return C.folio_segment_args_init(place, C.sizeof_folio_segment_args) },
		func() C.folio_status { return C.folio_attention_args_init(&args, C.sizeof_folio_attention_args) },
		func() C.folio_status {
			segment.kv_len = lens
			step.num_requests, step.num_tokens = C.int32_t(requests), C.int32_t(requests)
			step.cu_q = cCuQ
			step.segments, step.num_segments = segment, 1
			return C.folio_make_plan(l.op, &step, l.buffer, nil, &plan)
		},
		func() C.folio_status {
			return C.folio_make_nhd_view(&shape, unsafe.Pointer(&cache.K[0]), unsafe.Pointer(&cache.V[0]), &place.cache)
		},
		func() C.folio_status {
			place.table.indices, place.table.num_indices = cPages, C.int64_t(len(pages))
			place.table.indptr, place.table.num_rows = cIndptr, C.int32_t(requests)
			return C.folio_make_const_tensor_view(unsafe.Pointer(&q[0]), C.FOLIO_DTYPE_FLOAT32, 3, &sizes[0], &args.q)
		},
		func() C.folio_status {
			return C.folio_make_tensor_view(unsafe.Pointer(&out[0]), C.FOLIO_DTYPE_FLOAT32, 3, &sizes[0], &args.out)
		},
		func() C.folio_status {
			args.segments, args.num_segments = place, 1
			return C.folio_validate(&plan, &args)
		},
		func() C.folio_status { return C.folio_run(&plan, &args, l.workspace, l.bytes, nil) },
	}
	for _, step := range steps {
		if err := call(step); err != nil {
			return err
		}
	}
	return nil
}
