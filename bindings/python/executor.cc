#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "executor.hpp"
#include "folio/types/error.hpp"
#include "gil.hpp"
#include "views.hpp"

namespace folio::python {
namespace {

/// One parallel_for: which calls have been made. Python may keep `body` beyond it, and call it as it likes.
class ParallelWork {
 public:
  ParallelWork(int64_t n, ParallelBody body, void* context)
      : n_(n), body_(body), context_(context), taken_(static_cast<size_t>(n)) {}

  /// The call for `index`, on this thread, without the GIL. Throws where there is no such call to make any more.
  void call(int64_t index) {
    if (index < 0 || index >= n_)
      refuse("index is " + std::to_string(index) + "; it must be in [0, " + std::to_string(n_) + ")");
    if (!take(static_cast<size_t>(index))) refuse("body(" + std::to_string(index) + ") has been called before");
    {
      const ReleasedGil released;
      body_(context_, index);
      done();
    }
  }

  /// Makes the calls that are left, on this thread, and waits for those under way elsewhere.
  void finish() {
    for (size_t i = 0; i < taken_.size(); ++i) {
      if (!take(i)) continue;
      body_(context_, static_cast<int64_t>(i));
      done();
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ == n_; });
  }

 private:
  bool take(size_t index) { return !taken_[index].exchange(true); }

  void done() {
    const std::lock_guard lock(mutex_);
    ++done_;
    changed_.notify_all();
  }

  const int64_t n_;
  const ParallelBody body_;
  void* const context_;
  std::vector<std::atomic<bool>> taken_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t done_ = 0;
};

/// An engine's threads, as Python has them.
struct PythonExecutor {
  nb::object parallel_for;  ///< (n, body)
  nb::object pool;          ///< or something with concurrent.futures' map
  int32_t concurrency = 1;
  bool kept = false;  ///< for the process' life

  void run(int64_t n, const nb::object& body) const {
    const nb::object range = nb::handle(reinterpret_cast<PyObject*>(&PyRange_Type))(n);
    if (pool.is_valid()) {
      const nb::object results = pool.attr("map")(body, range);
      for (const nb::handle result : nb::iter(results)) (void)result;  // waits
    } else {
      parallel_for(n, body);
    }
  }
};

/// What Folio calls, from a thread with or without the GIL. What Python raises is reported, as in a destructor, and
/// never loses work: the calls that are missing are made here.
void parallel_for(void* self, int64_t n, ParallelBody body, void* context) {
  const auto& executor = *static_cast<const PythonExecutor*>(self);
  const auto work = std::make_shared<ParallelWork>(n, body, context);
  if (Py_IsInitialized() == 0) {
    work->finish();
    return;
  }
  const nb::gil_scoped_acquire gil;
  try {
    executor.run(n, nb::cpp_function([work](int64_t index) { work->call(index); }, nb::arg("index")));
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("folio.Executor");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    nb::python_error().discard_as_unraisable("folio.Executor");
  }
  const ReleasedGil released;
  work->finish();
}

PythonExecutor make_executor(nb::object threads, int32_t concurrency) {
  if (concurrency < 1) refuse("concurrency is " + std::to_string(concurrency) + "; it is 1 or more");
  if (nb::hasattr(threads, "map") && nb::hasattr(threads, "submit")) return {{}, std::move(threads), concurrency};
  if (PyCallable_Check(threads.ptr()) == 0) {
    throw nb::type_error("threads: expected a concurrent.futures.Executor or a function of (n, body)");
  }
  return {std::move(threads), {}, concurrency};
}

/// The first exception of a Python body that runs on the context's threads.
struct PythonBody {
  const nb::callable& body;
  std::mutex mutex;
  std::exception_ptr first;

  static void call(void* self, int64_t index) noexcept {
    auto& made = *static_cast<PythonBody*>(self);
    const nb::gil_scoped_acquire gil;
    try {
      made.body(index);
    } catch (...) {
      const std::lock_guard lock(made.mutex);
      if (made.first == nullptr) made.first = std::current_exception();
    }
  }
};

void run_on_context(const Context& context, int64_t n, nb::callable body) {
  if (n < 0) refuse("n is " + std::to_string(n) + "; it is not negative");
  PythonBody calls{body, {}, nullptr};
  {
    const ReleasedGil released;
    context.parallel_for(n, &PythonBody::call, &calls);
  }
  if (calls.first != nullptr) std::rethrow_exception(calls.first);
}

}  // namespace

bool executor_for_life(nb::handle source, Executor& executor) noexcept {
  executor = {};
  if (source.is_none()) return true;
  if (!nb::isinstance<PythonExecutor>(source)) return false;
  PythonExecutor* const self = nb::inst_ptr<PythonExecutor>(source);
  if (!self->kept) source.inc_ref();  // contexts and ops may outlive every handle that Python has
  self->kept = true;
  executor = {self, self->concurrency, &parallel_for};
  return true;
}

void bind_executor(nb::module_& m) {
  nb::class_<PythonExecutor>(
      m, "Executor",
      "Threads of the engine's that a CPU context computes on: a concurrent.futures.Executor, or a function that is "
      "called with (n, body) and calls body(i) for every i in range(n), on any threads, before it returns. body lets "
      "go "
      "of the interpreter. concurrency: how many calls make progress at once. Calls that were not made, and those of a "
      "function that raises, are made on the calling thread. A context keeps its executor as long as the process "
      "lives.")
      .def(
          "__init__",
          [](PythonExecutor* self, nb::object threads, int32_t concurrency) {
            new (self) PythonExecutor(make_executor(std::move(threads), concurrency));
          },
          nb::arg("threads"), nb::arg("concurrency"))
      .def_ro("concurrency", &PythonExecutor::concurrency)
      .def("__repr__", [](const PythonExecutor& self) {
        return "<folio.Executor: concurrency " + std::to_string(self.concurrency) + ">";
      });
}

void bind_context_calls(nb::module_& m) {
  const nb::handle type = nb::type<Context>();
  nb::cpp_function_def(
      &run_on_context, nb::scope(type), nb::name("parallel_for"), nb::is_method(), nb::arg("n"), nb::arg("body"),
      "Calls body(i) for every i in range(n) on the context's threads. Raises the first exception that "
      "a call raised, when all have ended; Error with UNSUPPORTED on a GPU.");
  m.def(
      "synchronize",
      [](const Context& context, nb::object stream) {
        const std::vector<Array> none;
        const Stream queue = to_stream(stream, context.device(), {&none});
        if (queue.handle != nullptr && context.device().type == DeviceType::kCpu)
          refuse("stream is given; a CPU has none");
        const ReleasedGil released;
        synchronize(context, queue);
      },
      nb::arg("context"), nb::arg("stream") = nb::none(),
      "Waits until everything that is enqueued on the stream so far is done. Raises Error with DEVICE_ERROR for what "
      "went wrong there.");
}

}  // namespace folio::python
