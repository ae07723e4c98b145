# folio_module(NAME dir_target SOURCES a.cc ... DEPENDS core ... [TESTS a_test.cc ...] [TEST_DEPENDS ...] [TEST_LIBRARIES ...])
#
# One target per directory: an object library folio_<NAME> that goes into the library FOLIO_LIBRARY (default: folio), and,
# with TESTS, one test program folio_<NAME>_test. DEPENDS names other modules (without the folio_ prefix); a directory may depend only on what stands
# below it (docs/architecture.md), which scripts/checks/check_includes.py enforces.
include_guard(GLOBAL)
find_package(Threads REQUIRED)

add_library(folio_options INTERFACE)
target_compile_features(folio_options INTERFACE cxx_std_20)
target_compile_options(folio_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic $<$<NOT:$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>>:-Wshadow> -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor>
  $<$<AND:$<BOOL:${FOLIO_WARNINGS_AS_ERRORS}>,$<COMPILE_LANGUAGE:CXX>>:-Werror>)
# What gcc infers from the flow of optimised code depends on what was inlined, down to the length of the source directory's
# path in a string constant: shown, and no reason to fail.
set(flow_warnings array-bounds free-nonheap-object maybe-uninitialized nonnull restrict stringop-overflow
    stringop-overread stringop-truncation)
if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
  list(APPEND flow_warnings dangling-pointer use-after-free)
endif()
if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  list(APPEND flow_warnings dangling-reference)
endif()
list(TRANSFORM flow_warnings PREPEND -Wno-error=)
target_compile_options(folio_options INTERFACE
  "$<$<AND:$<CXX_COMPILER_ID:GNU>,$<COMPILE_LANGUAGE:CXX>>:${flow_warnings}>")
target_include_directories(folio_options INTERFACE
  ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR}/src)

# What linking Folio's objects takes: programs of objects (tests) and the libraries.
set(FOLIO_LINK_LIBRARIES Threads::Threads)
if(FOLIO_HAS_CUDA)
  # 554: of a view of const elements, the conversion that adds const is never called. As intended.
  # Conversions of floats are constexpr through std::bit_cast, which device code may call only with the other option.
  target_compile_options(folio_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-diag-suppress=554 --expt-relaxed-constexpr>)
  target_include_directories(folio_options SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  list(APPEND FOLIO_LINK_LIBRARIES ${FOLIO_CUDART})
endif()
if(FOLIO_CUDA STREQUAL "EMULATED")
  target_compile_definitions(folio_options INTERFACE FOLIO_EMULATED_CUDA)
  target_include_directories(folio_options BEFORE INTERFACE ${PROJECT_SOURCE_DIR}/tests/emulation ${FOLIO_EMULATED_CODE})
endif()

if(FOLIO_BUILD_TESTS)
  # Every program of tests that need a GPU (label `cuda`), for scripts/gpu_check.sh.
  add_custom_target(folio_cuda_tests)
  # Every program of tests in which threads meet (label `threads`): what continuous integration runs under ThreadSanitizer.
  add_custom_target(folio_thread_tests)
endif()

set_property(GLOBAL PROPERTY FOLIO_MODULES "")

# What takes the compiler's time in a small source is the headers of the standard library: sources of a directory compiled
# together take half of it. Names in anonymous namespaces are then one directory's. Sources with options of their own, the
# kernels' inner loops, stay apart.
set(FOLIO_SOURCES_TOGETHER 1 CACHE STRING "How many sources of a directory of the library are compiled together")

# folio_compile_together(TARGET COUNT): up to COUNT of its sources at a time, where COUNT is above 1.
function(folio_compile_together target count)
  if(count GREATER 1)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${count})
    # A name in a neighbour may be shadowed (folio_options), and a member have a type that is local to its source.
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
    endif()
  endif()
endfunction()

function(folio_module)
  cmake_parse_arguments(M "" "NAME" "SOURCES;DEPENDS;TESTS;TEST_DEPENDS;TEST_LIBRARIES;TEST_LABELS" ${ARGN})
  set(target folio_${M_NAME})
  if(FOLIO_CUDA STREQUAL "EMULATED")
    folio_emulated_sources(M_SOURCES)
  endif()
  folio_compile_device_code_together(M_SOURCES)
  add_library(${target} OBJECT ${M_SOURCES})
  target_link_libraries(${target} PRIVATE folio_options Threads::Threads)
  folio_compile_together(${target} ${FOLIO_SOURCES_TOGETHER})
  set(device_code ${M_SOURCES})
  list(FILTER device_code INCLUDE REGEX "[.]cu$")
  set_source_files_properties(${device_code} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # CMake 3.31 would take them too
  set(library folio)
  if(FOLIO_LIBRARY)
    set(library ${FOLIO_LIBRARY})
  endif()
  set_property(GLOBAL APPEND PROPERTY FOLIO_MODULES ${target})
  set_property(GLOBAL APPEND PROPERTY FOLIO_MODULES_OF_${library} ${target})
  set_property(TARGET ${target} PROPERTY FOLIO_DEPENDS "${M_DEPENDS}")
  if(FOLIO_BUILD_TESTS AND M_TESTS)
    folio_test(NAME ${target}_test SOURCES ${M_TESTS} MODULES ${M_NAME} ${M_DEPENDS} ${M_TEST_DEPENDS}
               LIBRARIES ${M_TEST_LIBRARIES}
               LABELS unit ${M_TEST_LABELS})
  endif()
endfunction()

# Test programs are mostly the test framework's templates: slow to compile, and nothing in them needs to be fast or measured.
set(FOLIO_TEST_COMPILE_OPTIONS "" CACHE STRING "Compiler options for test programs only, after all others")

# The kernels' inner loops, unrolled and instrumented, would take minutes each.
set(FOLIO_KERNEL_COMPILE_OPTIONS "" CACHE STRING "Compiler options for the kernels' arithmetic only, after all others")

# Every test of attention asks the oracle, so that an instrumented build spends most of its time there: optimised, and, since no
# two threads are in it at once, with line counts that need no atomic additions.
set(FOLIO_ORACLE_COMPILE_OPTIONS "" CACHE STRING "Compiler options for the oracle of the tests only, after all others")

# The test framework's and JSON's headers are compiled once for all test programs. Not beside a compiler cache, which is as
# quick on its own and sees through precompiled headers only with settings of its user's.
# A compiler that cannot use them reads the headers themselves: slower, and no reason to fail.
option(FOLIO_CACHE_TESTS "Where a compiler launcher is set, test programs use it too; OFF is quicker while the cache is empty" ON)
set(CMAKE_PCH_WARN_INVALID OFF)
if(FOLIO_BUILD_TESTS AND NOT (CMAKE_CXX_COMPILER_LAUNCHER AND FOLIO_CACHE_TESTS))
  file(CONFIGURE OUTPUT test_headers.cc CONTENT "int main() { return 0; }\n")
  add_executable(folio_test_headers EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cc)
  target_compile_options(folio_test_headers PRIVATE ${FOLIO_TEST_COMPILE_OPTIONS})
  target_link_libraries(folio_test_headers PRIVATE folio_options Threads::Threads GTest::gtest GTest::gmock
                        nlohmann_json::nlohmann_json)
  set_target_properties(folio_test_headers PROPERTIES CXX_COMPILER_LAUNCHER "")
  target_precompile_headers(folio_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h> <nlohmann/json.hpp>)
endif()

# What takes the compiler's time in a test program is templates (of the framework, of JSON), instantiated anew in every source:
# sources compiled together take a third of it. One that is edited then takes its neighbours along.
set(FOLIO_TEST_SOURCES_TOGETHER 1 CACHE STRING "How many sources of a test program are compiled together")

# folio_use_test_options(TARGET [APART]): compiles a test program as test programs are. APART: every source by itself.
function(folio_use_test_options target)
  if(NOT "APART" IN_LIST ARGN)
    folio_compile_together(${target} ${FOLIO_TEST_SOURCES_TOGETHER})
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${FOLIO_TEST_COMPILE_OPTIONS}>")
  if(TARGET folio_test_headers)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER "")
    target_precompile_headers(${target} REUSE_FROM folio_test_headers)
  endif()
endfunction()

# ctest runs programs, not their tests: starting a program takes longer than most of its tests, and there are thousands. A slow
# program is given to it in parts, which run side by side; where instrumentation makes all of them slow, all are.
set(FOLIO_TEST_PARTS 1 CACHE STRING "Parts in which ctest runs each test program, where the program has no number of its own")

# folio_add_tests(PROGRAM LABEL PARTS): tells ctest of a program. Tests of a GPU run with ContextOptions::validate_tables.
function(folio_add_tests program label parts)
  set(checks_tables 0)
  if(label MATCHES "cuda")
    set(checks_tables 1)
  endif()
  if(parts LESS FOLIO_TEST_PARTS)
    set(parts ${FOLIO_TEST_PARTS})
  endif()
  foreach(part RANGE 1 ${parts})
    set(name ${program})
    set(environment FOLIO_VALIDATE_TABLES=${checks_tables} GTEST_BRIEF=1)
    if(parts GREATER 1)
      math(EXPR index "${part} - 1")
      string(APPEND name ".${part}")
      list(APPEND environment GTEST_TOTAL_SHARDS=${parts} GTEST_SHARD_INDEX=${index})
    endif()
    add_test(NAME ${name} COMMAND ${program})
    # The slow ones come first, so that none of them is left alone at the end.
    set_tests_properties(${name} PROPERTIES TIMEOUT 900 LABELS "${label}" ENVIRONMENT "${environment}" COST ${parts})
  endforeach()
endfunction()

# Instrumented builds run the quick ones alone (label `unit` or `quick`), and need no others.
option(FOLIO_BUILD_SLOW_TESTS "Build all test programs, not only those labelled unit or quick" ON)

# folio_test(NAME t SOURCES ... [MODULES core ...] [LIBRARIES ...] [LABELS ...]): a GoogleTest program. Labels: `unit` (given
# by folio_module) and `quick` run under AddressSanitizer in continuous integration, `slow` does not; `threads` under
# ThreadSanitizer; `cuda` needs a GPU. MODULES links the objects of those modules directly (white-box tests); tests of the
# public API link the libraries (LIBRARIES folio, folio_backends, folio_testing) instead. GPU_FILTER: the tests, as GoogleTest's filters name them, that a GPU must pass
# too. In builds with CUDA the program then has one more test, <name>.cuda, which runs them there
# (src/attention/device_test_util.hpp, or what the program has of its own for FOLIO_TEST_DEVICE); sources that use the former must
# include ${FOLIO_DEVICE_FOR_TEST}. APART: its sources have names in common, and are compiled one by one. PARTS: in how many parts
# ctest runs it.
function(folio_test)
  cmake_parse_arguments(T "APART" "NAME;PARTS" "SOURCES;MODULES;LIBRARIES;LABELS;GPU_FILTER" ${ARGN})
  add_executable(${T_NAME} ${T_SOURCES})
  if(NOT FOLIO_BUILD_SLOW_TESTS AND NOT T_LABELS MATCHES "unit|quick")
    set_target_properties(${T_NAME} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  if(T_APART)
    folio_use_test_options(${T_NAME} APART)
  else()
    folio_use_test_options(${T_NAME})
  endif()
  list(REMOVE_DUPLICATES T_MODULES)
  foreach(module IN LISTS T_MODULES)
    target_link_libraries(${T_NAME} PRIVATE $<TARGET_OBJECTS:folio_${module}>)
    add_dependencies(${T_NAME} folio_${module})
  endforeach()
  target_link_libraries(${T_NAME} PRIVATE folio_options ${FOLIO_LINK_LIBRARIES} GTest::gtest GTest::gmock GTest::gtest_main
                        nlohmann_json::nlohmann_json ${T_LIBRARIES})
  # Where tests find tests/golden.
  target_compile_definitions(${T_NAME} PRIVATE FOLIO_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if("cuda" IN_LIST T_LABELS)
    add_dependencies(folio_cuda_tests ${T_NAME})
  endif()
  if("threads" IN_LIST T_LABELS)
    add_dependencies(folio_thread_tests ${T_NAME})
  endif()
  if(NOT T_PARTS)
    set(T_PARTS 1)
  endif()
  folio_add_tests(${T_NAME} "${T_LABELS}" ${T_PARTS})
  if(T_GPU_FILTER AND FOLIO_HAS_CUDA)
    list(JOIN T_GPU_FILTER ":" filter)
    string(REPLACE ":-" "-" filter "${filter}")
    if(FOLIO_CUDA STREQUAL "EMULATED")  # whose runtime makes allocations of its own
      if(filter MATCHES "-")
        string(APPEND filter ":*Allocat*")
      else()
        string(APPEND filter "-*Allocat*")
      endif()
    endif()
    add_test(NAME ${T_NAME}.cuda COMMAND ${T_NAME} --gtest_filter=${filter})
    set_tests_properties(${T_NAME}.cuda PROPERTIES TIMEOUT 600 LABELS cuda
                         ENVIRONMENT "FOLIO_TEST_DEVICE=cuda;FOLIO_VALIDATE_TABLES=1;GTEST_BRIEF=1"
                         SKIP_REGULAR_EXPRESSION "FOLIO_TEST_DEVICE: no GPU")
    add_dependencies(folio_cuda_tests ${T_NAME})
  endif()
endfunction()

# folio_test_objects(NAME o SOURCES ...): what several test programs share (they name it among their LIBRARIES), compiled once.
# Optimised: these sources make the tests' values, millions of them, and compare results.
function(folio_test_objects)
  cmake_parse_arguments(T "" "NAME" "SOURCES" ${ARGN})
  add_library(${T_NAME} OBJECT EXCLUDE_FROM_ALL ${T_SOURCES})
  target_link_libraries(${T_NAME} PRIVATE folio_options nlohmann_json::nlohmann_json)
  target_compile_definitions(${T_NAME} PRIVATE FOLIO_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(${T_NAME} PRIVATE ${FOLIO_TEST_COMPILE_OPTIONS} -O2)
endfunction()

# The operators new and delete of programs that count allocations (core/allocation_test_util.hpp).
set(FOLIO_COUNTING_NEW ${PROJECT_SOURCE_DIR}/src/core/allocation_test_util.cc)

# What makes a program's suites run on either device.
set(FOLIO_DEVICE_FOR_TEST ${PROJECT_SOURCE_DIR}/src/attention/device_test_util.cc)
if(FOLIO_HAS_CUDA)
  list(APPEND FOLIO_DEVICE_FOR_TEST ${PROJECT_SOURCE_DIR}/src/attention/gpu_memory_test_util.cc)
else()
  list(APPEND FOLIO_DEVICE_FOR_TEST ${PROJECT_SOURCE_DIR}/src/attention/no_gpu_memory_test_util.cc)
endif()
