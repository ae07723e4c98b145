// The token pool's helpers on a GPU: draft branches, trees, the request table, a captured batch's inputs. Expectations
// are the host's functions.
#include <atomic>
#include <numeric>
#include <optional>
#include <string>
#include <thread>

#include "device_array.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/page_table.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"
#include "twin_array.hpp"

namespace folio::cuda_test {
namespace {

using namespace folio::backends;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Flags = std::vector<uint8_t>;

class TokenPoolFunctions : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped()) gpu_.emplace(Context::cuda(0)), faults_.emplace(*gpu_), stream_.emplace();
  }

  int32_t draw(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random_); }

  /// The fault that kernels so far have reported.
  std::string fault() {
    stream_->wait();
    try {
      faults_->check();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  Ints trees(int32_t requests, int32_t nodes) {
    Ints parents;
    for (int32_t i = 0; i < requests * nodes; ++i) parents.push_back(i % nodes == 0 ? -1 : draw(0, i % nodes - 1));
    return parents;
  }

  std::mt19937 random_{7};
  std::optional<Context> gpu_;
  std::optional<DeviceFaults> faults_;
  std::optional<TestStream> stream_;
};

PageTableView table_at(Twin<int32_t>& table, int32_t rows, int64_t columns, bool on_gpu) {
  PageTableView view = dense_table(table.host, rows, columns);
  view.indices = table.at(on_gpu);
  return view;
}

TEST_F(TokenPoolFunctions, DraftBranchesAreTheHosts) {
  for (const int32_t topk : {1, 4}) {
    for (const int32_t page_size : {1, 16}) {
      for (const int32_t requests : {0, 1, 5, 300}) {
        const DraftBranches branches{topk, 3, page_size};
        const int32_t longest = requests == 5 ? 20000 : 600;
        // A shorter request may need more: its last page is fuller.
        const int64_t columns = draft_row_columns(longest, branches) + 2 * topk * page_size;
        const int32_t rows = std::max(requests, 1) + 1;
        Ints slots(static_cast<size_t>(rows * columns));
        for (int32_t& slot : slots) slot = draw(0, 99999);
        Twin<int32_t> table(slots), row(Ints(static_cast<size_t>(requests))), lens(row.host), starts(row.host);
        for (size_t r = 0; r < row.host.size(); ++r) {
          row.host[r] = rows - 1 - static_cast<int32_t>(r);
          lens.host[r] = draw(0, longest);
          starts.host[r] = draw(0, longest - lens.host[r]);
        }
        row = Twin<int32_t>(row.host), lens = Twin<int32_t>(lens.host), starts = Twin<int32_t>(starts.host);
        const int64_t sum = std::accumulate(lens.host.begin(), lens.host.end(), int64_t{0});
        const int64_t stride = draft_kv_indices_len(sum, requests, branches, 3) + 5, offsets = requests * topk + 3;
        Twin<int32_t> indptr(Ints(static_cast<size_t>(3 * offsets), -7)),
            indices(Ints(static_cast<size_t>(3 * stride), -7));
        for (const bool on_gpu : {false, true}) {
          const DraftKvIndicesArgs args{table_at(table, rows, columns, on_gpu),
                                        row.span(on_gpu),
                                        lens.span(on_gpu),
                                        starts.span(on_gpu),
                                        branches,
                                        3,
                                        100000};
          const DraftKvIndices out{indptr.span(on_gpu), offsets, indices.span(on_gpu), stride};
          if (on_gpu) {
            generate_draft_decode_kv_indices(args, out, *faults_, stream_->get());
          } else {
            generate_draft_decode_kv_indices(args, out);
          }
        }
        EXPECT_EQ(fault(), "");
        EXPECT_TRUE(indptr.equal()) << requests;
        EXPECT_TRUE(indices.equal()) << requests;
      }
    }
  }
}

/// A request that cannot be listed has the dummy slot, and the others have theirs; nothing is written behind a row.
TEST_F(TokenPoolFunctions, DraftBranchesThatCannotBeListed_AreReported) {
  Ints slots(4 * 20);
  std::iota(slots.begin(), slots.end(), 0);
  Twin<int32_t> table(slots), rows(Ints{1, 9, 2}), lens(Ints{2, 3, 1}), indptr(Ints(4, -7)), indices(Ints(11, -7));
  DraftKvIndicesArgs args{table_at(table, 4, 20, true), rows.span(true), lens.span(true), {}, {1, 1, 1}, 1, 0};
  generate_draft_decode_kv_indices(args, {indptr.span(true), 4, indices.span(true).first(9), 9}, *faults_,
                                   stream_->get());
  EXPECT_NE(fault().find("request 1 has row 9"), std::string::npos);
  EXPECT_EQ(indptr.gpu(), (Ints{0, 3, 7, 9}));
  EXPECT_EQ(indices.gpu(), (Ints{20, 21, 22, 0, 0, 0, 0, 40, 41, -7, -7}));
  rows = Twin<int32_t>(Ints{1, 3, 2});
  indices = Twin<int32_t>(Ints(11, -7));
  args.req_pool_indices = rows.span(true);
  generate_draft_decode_kv_indices(args, {indptr.span(true), 4, indices.span(true).first(5), 5}, *faults_,
                                   stream_->get());
  EXPECT_NE(fault().find("of kv_indices, which has 5"), std::string::npos);
  EXPECT_EQ(indptr.gpu(), (Ints{0, 3, 5, 5}));
  EXPECT_EQ(indices.gpu(), (Ints{20, 21, 22, 60, 61, -7, -7, -7, -7, -7, -7}));
  EXPECT_EQ(fault(), "") << "told once";
}

TEST_F(TokenPoolFunctions, TreesAreTheHosts) {
  for (const DraftTreeShape& shape :
       {DraftTreeShape{1, 1, 2}, DraftTreeShape{4, 3, 16}, DraftTreeShape{8, 6, 64}, DraftTreeShape{10, 8, 300}}) {
    const auto candidates = static_cast<size_t>(draft_candidates(shape));
    const auto extensions = static_cast<size_t>(draft_parent_list_len(shape));
    const auto nodes = static_cast<size_t>(shape.draft_token_num);
    for (const size_t requests : {size_t{1}, size_t{37}}) {
      // Scores fall along paths, so that a tree results.
      std::vector<float> scores(requests * candidates);
      Longs list(requests * extensions);
      const auto topk = static_cast<size_t>(shape.topk);
      for (size_t r = 0; r < requests; ++r) {
        float* const score = scores.data() + r * candidates;
        for (size_t c = 0; c < candidates; ++c) {
          const size_t extension = c / topk;
          const float factor = static_cast<float>(draw(1, 9)) / 10.0f;
          if (extension == 0) {
            score[c] = factor;
            continue;
          }
          int64_t& parent = list[r * extensions + extension];
          if (c % topk == 0) {
            // Extensions 1 to topk extend the first step's candidates, the next topk the second step's, and so on.
            const size_t step = (extension - 1) / topk;
            const size_t before = step == 0 ? 0 : topk + (step - 1) * topk * topk;
            parent =
                static_cast<int64_t>(before + (step == 0 ? (extension - 1) % topk : (extension - 1) % topk * topk));
          }
          score[c] = score[parent] * factor;
        }
        if (extensions > 0) list[r * extensions] = -1;
      }
      Longs token_values(scores.size()), bonus_values(requests);
      std::iota(token_values.begin(), token_values.end(), 7);
      std::iota(bonus_values.begin(), bonus_values.end(), 1000000);
      Ints lengths(requests);
      for (int32_t& length : lengths) length = draw(0, 700);
      Twin<float> score(scores);
      Twin<int64_t> tokens(token_values), bonus(bonus_values), parent_list(list);
      Twin<int64_t> selected(Longs(requests * (nodes - 1), -7)), drafts(Longs(requests * nodes, -7));
      Twin<int32_t> parents(Ints(requests * nodes, -7)), seq_lens(lengths);
      Twin<int32_t> positions(parents.host), index(parents.host), child(parents.host), sibling(parents.host);
      select_draft_tokens(score.host, tokens.host, bonus.host, shape, selected.host, drafts.host);
      draft_tree_parents(parent_list.host, selected.host, shape, parents.host);
      draft_tree_positions(parents.host, seq_lens.host, positions.host);
      draft_tree_links(parents.host, shape.draft_token_num, index.host, child.host, sibling.host);
      const Stream stream = stream_->get();
      select_draft_tokens(score.span(true), tokens.span(true), bonus.span(true), shape, selected.span(true),
                          drafts.span(true), *faults_, stream);
      draft_tree_parents(parent_list.span(true), selected.span(true), shape, parents.span(true), *faults_, stream);
      draft_tree_positions(parents.span(true), seq_lens.span(true), positions.span(true), *faults_, stream);
      draft_tree_links(parents.span(true), shape.draft_token_num, index.span(true), child.span(true),
                       sibling.span(true), *faults_, stream);
      EXPECT_EQ(fault(), "");
      EXPECT_TRUE(selected.equal());
      EXPECT_TRUE(drafts.equal());
      EXPECT_TRUE(parents.equal());
      EXPECT_TRUE(positions.equal());
      EXPECT_TRUE(index.equal());
      EXPECT_TRUE(child.equal());
      EXPECT_TRUE(sibling.equal());
    }
  }
}

TEST_F(TokenPoolFunctions, MasksAreTheHosts) {
  for (const int32_t nodes : {1, 7, 16, 32, 64}) {
    for (const int32_t requests : {1, 29}) {
      Ints lengths(static_cast<size_t>(requests));
      for (int32_t& length : lengths) length = draw(0, 2000);
      Twin<int32_t> parents(trees(requests, nodes)), seq_lens(lengths);
      for (int32_t f = 0; f < 5; ++f) {
        const auto form = static_cast<TreeMaskForm>(f);
        if (form == TreeMaskForm::kQlenOnlyBitpacking && nodes > 32) continue;
        const bool full = form == TreeMaskForm::kFullMask || form == TreeMaskForm::kFullBits;
        for (const int32_t window_left : {-1, 0, 5, 900}) {
          if (window_left >= 0 && !full) continue;
          const auto bytes = static_cast<size_t>(tree_mask_bytes(form, lengths, nodes));
          Twin<uint8_t> mask(Flags(bytes + 9, 0xaa));
          fill_tree_mask(form, parents.host, seq_lens.host, nodes, mask.host, window_left);
          fill_tree_mask(form, parents.span(true), seq_lens.span(true), nodes, mask.span(true), *faults_, window_left,
                         stream_->get());
          EXPECT_EQ(fault(), "");
          EXPECT_TRUE(mask.equal()) << nodes << " nodes, form " << f << ", window " << window_left;
        }
      }
    }
  }
}

/// Whatever parents are, kernels end, stay in their arrays and say so.
TEST_F(TokenPoolFunctions, WhatIsNoTree_IsReported) {
  Twin<int32_t> parents(Ints{-1, 0, 2, INT32_MAX, -1, 0, 1, 2}), seq_lens(Ints{5, 6});
  Twin<int32_t> positions(Ints(8, -7));
  draft_tree_positions(parents.span(true), seq_lens.span(true), positions.span(true), *faults_, stream_->get());
  EXPECT_NE(fault().find("it must be a node before it"), std::string::npos);
  EXPECT_EQ(positions.gpu(), (Ints{5, 6, 6, 6, 6, 7, 8, 9}));
  const DraftTreeShape shape{2, 2, 3};
  Twin<int64_t> list(Longs{-1, 0, 1}), selected(Longs{0, 99});
  Twin<int32_t> found(Ints(3, -7));
  draft_tree_parents(list.span(true), selected.span(true), shape, found.span(true), *faults_, stream_->get());
  EXPECT_NE(fault().find("selects candidate 99; there are 6"), std::string::npos);
  EXPECT_EQ(found.gpu(), (Ints{-1, 0, 0}));
  Twin<uint8_t> mask(Flags(40, 0xaa));
  Twin<int32_t> chains(Ints{-1, 0, -1, 0});
  fill_tree_mask(TreeMaskForm::kFullMask, chains.span(true), seq_lens.span(true), 2, mask.span(true).first(17),
                 *faults_, -1, stream_->get());
  EXPECT_NE(fault().find("of the mask, which has 17"), std::string::npos);
  EXPECT_EQ(mask.gpu()[17], 0xaa);
}

/// One graph from candidates to the mask: replayed with other scores and lengths it gives what the host gives.
TEST_F(TokenPoolFunctions, TreesAreMadeInGraphs) {
  const DraftTreeShape shape{3, 2, 6};
  constexpr int32_t kRequests = 5;
  const auto candidates = static_cast<size_t>(draft_candidates(shape));
  std::vector<float> scores(kRequests * candidates);
  Longs list;
  for (int32_t r = 0; r < kRequests; ++r) list.insert(list.end(), {-1, 0, 1, 2});
  DeviceArray<float> score(scores.size());
  DeviceArray<int64_t> tokens(Longs(scores.size(), 4)), bonus(Longs(kRequests, 9)), parent_list(list);
  DeviceArray<int64_t> selected(kRequests * 5), drafts(kRequests * 6);
  DeviceArray<int32_t> seq_lens(kRequests), parents(kRequests * 6), positions(kRequests * 6);
  const size_t room = kRequests * (6 * (400 + 6) + 7) / 8;
  DeviceArray<uint8_t> mask(room);
  const auto in = [](const auto& array) { return std::span(array.data(), array.bytes() / sizeof(*array.data())); };
  const CapturedGraph graph(*stream_, [&] {
    const Stream stream = stream_->get();
    select_draft_tokens(in(score), in(tokens), in(bonus), shape, in(selected), in(drafts), *faults_, stream);
    draft_tree_parents(in(parent_list), in(selected), shape, in(parents), *faults_, stream);
    draft_tree_positions(in(parents), in(seq_lens), in(positions), *faults_, stream);
    fill_tree_mask(TreeMaskForm::kFullBits, in(parents), in(seq_lens), 6, in(mask), *faults_, -1, stream);
  });
  for (int round = 0; round < 5; ++round) {
    Ints lengths;
    for (int32_t r = 0; r < kRequests; ++r) lengths.push_back(draw(0, 400));
    for (size_t i = 0; i < scores.size(); ++i) {
      const size_t c = i % candidates;
      const float factor = static_cast<float>(draw(1, 9)) / 10.0f;
      scores[i] = c < 3 ? factor : scores[i - c + c / 3 - 1] * factor;
    }
    score.set(scores);
    seq_lens.set(lengths);
    graph.launch(*stream_);
    EXPECT_EQ(fault(), "");
    Longs expected_selected(kRequests * 5), expected_drafts(kRequests * 6);
    Ints expected_parents(kRequests * 6), expected_positions(kRequests * 6);
    select_draft_tokens(scores, tokens.get(), bonus.get(), shape, expected_selected, expected_drafts);
    draft_tree_parents(list, expected_selected, shape, expected_parents);
    draft_tree_positions(expected_parents, lengths, expected_positions);
    Flags expected_mask(static_cast<size_t>(tree_mask_bytes(TreeMaskForm::kFullBits, lengths, 6)));
    fill_tree_mask(TreeMaskForm::kFullBits, expected_parents, lengths, 6, expected_mask);
    EXPECT_EQ(drafts.get(), expected_drafts);
    EXPECT_EQ(parents.get(), expected_parents);
    EXPECT_EQ(positions.get(), expected_positions);
    Flags written = mask.get();
    written.resize(expected_mask.size());
    EXPECT_EQ(written, expected_mask);
  }
}

Ints contents(const PageTableView& table) {
  Ints entries(static_cast<size_t>(table.num_indices));
  check(cudaMemcpy(entries.data(), table.indices, entries.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
  return entries;
}

/// Work on a stream waits until this is released.
class HeldStream {
 public:
  explicit HeldStream(const TestStream& stream) {
    const auto wait = [](void* released) {
      while (!static_cast<std::atomic<bool>*>(released)->load()) std::this_thread::yield();
    };
    check(cudaLaunchHostFunc(stream.native(), wait, &released_));
  }
  void release() { released_ = true; }

 private:
  std::atomic<bool> released_ = false;
};

/// Behind a stream that is held up: no write waits, and none is lost.
TEST_F(TokenPoolFunctions, WritesFromTheHostDoNotWait) {
  DeviceReqToTokenPool pool(*gpu_, 1, 4);
  GraphInputs inputs(*gpu_, 2);
  ASSERT_EQ(pool.alloc(), 1);
  pool.write(1, 3, Ints{8}, stream_->get());  // loads the kernels, which waits for the device
  static_cast<void>(inputs.pad_from_host({}, 2, stream_->get()));
  stream_->wait();
  HeldStream held(*stream_);
  for (int32_t position = 0; position < 3; ++position) pool.write(1, position, Ints{position + 5}, stream_->get());
  const ForwardBatch padded = inputs.pad_from_host({}, 2, stream_->get());
  EXPECT_EQ(cudaStreamQuery(stream_->native()), cudaErrorNotReady);
  static_cast<void>(cudaGetLastError());
  held.release();
  stream_->wait();
  EXPECT_EQ(contents(pool.table()), (Ints{0, 0, 0, 0, 5, 6, 7, 8}));
  Ints lengths(2);
  check(cudaMemcpy(lengths.data(), padded.seq_lens.data(), 8, cudaMemcpyDeviceToHost));
  EXPECT_EQ(lengths, (Ints{1, 1}));
}

/// Many writes in flight; the host's arrays may change as soon as a call returns.
TEST_F(TokenPoolFunctions, TheRequestTableIsWrittenFromTheHost) {
  constexpr int32_t kRows = 9, kColumns = 700;
  ReqToTokenPool host(kRows, kColumns);
  DeviceReqToTokenPool pool(*gpu_, kRows, kColumns);
  const PageTableView table = pool.table();
  EXPECT_EQ(contents(table), Ints(static_cast<size_t>((kRows + 1) * kColumns), 0));
  Ints rows(kRows);
  ASSERT_TRUE(pool.alloc(rows));
  ASSERT_TRUE(host.alloc(rows));
  Ints lens(kRows, 0);
  for (int round = 0; round < 60; ++round) {
    Ints first, count, slots;
    for (size_t r = 0; r < rows.size(); ++r) {
      const int32_t fresh = std::min(draw(0, 20), kColumns - lens[r]);
      first.push_back(lens[r]);
      count.push_back(fresh);
      Ints own(static_cast<size_t>(fresh));
      for (int32_t& slot : own) slot = draw(1, 99999);
      host.write(rows[r], lens[r], own);
      slots.insert(slots.end(), own.begin(), own.end());
      lens[r] += fresh;
    }
    ReqToTokenWrites writes;
    writes.req_pool_indices = rows;
    writes.first = first;
    writes.lens = count;
    Longs wide(slots.begin(), slots.end());
    if (round % 2 == 0) {
      writes.slots = slots;
    } else {
      writes.out_cache_loc = wide;
    }
    pool.write(writes, stream_->get());
    std::fill(slots.begin(), slots.end(), -1);
    std::fill(wide.begin(), wide.end(), -1);
  }
  Ints one(kColumns);
  std::iota(one.begin(), one.end(), 5);
  pool.write(4, 0, one, stream_->get());
  host.write(4, 0, one);
  std::fill(one.begin(), one.end(), -1);
  stream_->wait();
  const PageTableView expected = host.table();
  EXPECT_EQ(contents(table), Ints(expected.indices, expected.indices + expected.num_indices));
  EXPECT_EQ(pool.table().indices, table.indices);
  pool.clear(stream_->get());
  stream_->wait();
  EXPECT_EQ(contents(table), Ints(static_cast<size_t>((kRows + 1) * kColumns), 0));
  EXPECT_EQ(pool.available(), kRows);
}

/// A host pool's copy has what it held, and what is written from then on; slots of the device do not reach it.
TEST_F(TokenPoolFunctions, TheRequestTableCopiesAHostPool) {
  ReqToTokenPool host(2, 6);
  ASSERT_EQ(host.alloc(), 1);
  host.write(1, 0, Ints{5, 6});
  DeviceReqToTokenPool pool(*gpu_, host);
  ASSERT_EQ(pool.alloc(), 2);
  pool.write(1, 2, Ints{7}, stream_->get());
  pool.write(2, 0, Ints{8, 9}, stream_->get());
  EXPECT_THROW(pool.write(2, 5, Ints{8, 9}, stream_->get()), Error);
  stream_->wait();
  EXPECT_EQ(contents(pool.table()), (Ints{0, 0, 0, 0, 0, 0, 5, 6, 7, 0, 0, 0, 8, 9, 0, 0, 0, 0}));
  EXPECT_EQ(Ints(host.row(2).begin(), host.row(2).end()), (Ints{8, 9, 0, 0, 0, 0}));
  Twin<int32_t> rows(Ints{1}), ends(Ints{4}), slots(Ints{3});
  ReqToTokenWrites writes;
  writes.req_pool_indices = rows.span(true);
  writes.ends = ends.span(true);
  writes.slots = slots.span(true);
  EXPECT_THROW(pool.write(writes, *faults_, stream_->get()), Error);
}

/// Slots that the device has: in a graph, with padding, and with a request that cannot be written.
TEST_F(TokenPoolFunctions, TheRequestTableIsWrittenInGraphs) {
  DeviceReqToTokenPool pool(*gpu_, 3, 8);
  DeviceArray<int32_t> rows(4), ends(4);
  DeviceArray<int64_t> slots(4);
  ReqToTokenWrites writes;
  writes.req_pool_indices = {rows.data(), 4};
  writes.ends = {ends.data(), 4};
  writes.out_cache_loc = {slots.data(), 4};
  const CapturedGraph graph(*stream_, [&] {
    pool.write(writes, *faults_, stream_->get());
    // What lies on the host would be read when the graph is replayed.
    Ints held(1);
    ASSERT_TRUE(pool.alloc(held));
    EXPECT_THROW(pool.write(held[0], 0, held, stream_->get()), Error);
  });
  const auto replay = [&](const Ints& row, const Ints& end, const Longs& slot) {
    rows.set(row);
    ends.set(end);
    slots.set(slot);
    graph.launch(*stream_);
    stream_->wait();
  };
  replay({2, 1, 0, 0}, {1, 3, 1, 1}, {50, 60, 0, 0});
  replay({2, 1, 0, 0}, {2, 4, 1, 1}, {51, 61, 0, 0});
  EXPECT_EQ(fault(), "");
  Ints expected(32);
  expected[16] = 50, expected[17] = 51, expected[8 + 2] = 60, expected[8 + 3] = 61;
  EXPECT_EQ(contents(pool.table()), expected);
  replay({2, 1, 4, 0}, {3, 9, 1, 1}, {52, 62, 7, 0});
  EXPECT_NE(fault(), "");
  expected[18] = 52;
  EXPECT_EQ(contents(pool.table()), expected);
  // Extends: offsets are sums of lengths.
  Twin<int32_t> row(Ints{3, 1, 2}), first(Ints{0, 5, 6}), lens(Ints{3, 0, 2}), fresh(Ints{1, 2, 3, 4, 5});
  ReqToTokenWrites extend;
  extend.req_pool_indices = row.span(true);
  extend.first = first.span(true);
  extend.lens = lens.span(true);
  extend.slots = fresh.span(true);
  pool.write(extend, *faults_, stream_->get());
  EXPECT_EQ(fault(), "");
  expected[24] = 1, expected[25] = 2, expected[26] = 3, expected[22] = 4, expected[23] = 5;
  EXPECT_EQ(contents(pool.table()), expected);
}

/// A captured batch's inputs from the host's arrays and from the device's: what the host pads.
TEST_F(TokenPoolFunctions, GraphInputsAreTheHosts) {
  constexpr int32_t kMost = 40, kDrafts = 3;
  const size_t tree_bytes = (kDrafts * kDrafts + 7) / 8;
  GraphInputs host(kMost, kDrafts), gpu(*gpu_, kMost, kDrafts);
  const int32_t* address = nullptr;
  for (int round = 0; round < 40; ++round) {
    const auto count = static_cast<size_t>(draw(0, kMost));
    const int32_t padded = draw(static_cast<int32_t>(count), kMost);
    const bool from_host = round % 2 == 0, known = round % 4 < 2, whole = round % 3 == 0;
    Ints row, length, encoder;
    Longs slot, window;
    Flags bits;
    for (size_t r = 0; r < count; ++r) {
      row.push_back(draw(1, 99)), length.push_back(draw(1, 999)), encoder.push_back(draw(1, 99));
      for (int t = 0; t < kDrafts; ++t) slot.push_back(draw(1, 9999)), window.push_back(draw(1, 999));
      for (size_t b = 0; b < tree_bytes; ++b) bits.push_back(static_cast<uint8_t>(draw(0, 255)));
    }
    Twin<int32_t> rows(row), lens(length), encoders(encoder);
    Twin<int64_t> slots(slot), windows(window);
    Twin<uint8_t> tree(bits);
    const auto batch_at = [&](bool on_gpu) {
      ForwardBatch batch;
      batch.forward_mode = ForwardMode::kTargetVerify;
      batch.batch_size = static_cast<int32_t>(count);
      batch.req_pool_indices = rows.span(on_gpu);
      batch.seq_lens = lens.span(on_gpu);
      batch.out_cache_loc = slots.span(on_gpu);
      batch.spec_info.draft_token_num = kDrafts;
      if (whole) {
        batch.window_out_cache_loc = windows.span(on_gpu);
        batch.encoder_lens = encoders.span(on_gpu);
        batch.spec_info.tree_mask = tree.span(on_gpu);
      }
      if (known) batch.seq_lens_cpu = length;
      return batch;
    };
    const ForwardBatch expected = host.pad(batch_at(false), padded);
    const ForwardBatch got = from_host ? gpu.pad_from_host(batch_at(false), padded, stream_->get())
                                       : gpu.pad(batch_at(true), padded, stream_->get());
    if (from_host) {  // the arrays may change
      for (Twin<int32_t>* one : {&rows, &lens, &encoders}) std::fill(one->host.begin(), one->host.end(), -1);
      std::fill(slots.host.begin(), slots.host.end(), -1);
    }
    stream_->wait();
    const auto same = [](auto on_gpu, auto on_host) {
      std::vector<std::remove_const_t<typename decltype(on_gpu)::element_type>> values(on_gpu.size());
      if (!values.empty()) check(cudaMemcpy(values.data(), on_gpu.data(), on_gpu.size_bytes(), cudaMemcpyDeviceToHost));
      return std::equal(values.begin(), values.end(), on_host.begin(), on_host.end());
    };
    EXPECT_EQ(got.batch_size, padded);
    EXPECT_TRUE(same(got.req_pool_indices, expected.req_pool_indices));
    EXPECT_TRUE(same(got.seq_lens, expected.seq_lens));
    EXPECT_TRUE(same(got.out_cache_loc, expected.out_cache_loc));
    EXPECT_TRUE(same(got.window_out_cache_loc, expected.window_out_cache_loc));
    EXPECT_TRUE(same(got.encoder_lens, expected.encoder_lens));
    EXPECT_TRUE(same(got.spec_info.tree_mask, expected.spec_info.tree_mask));
    if (from_host || known || count == 0) {
      EXPECT_EQ(got.seq_lens_sum, expected.seq_lens_sum);
      EXPECT_TRUE(std::ranges::equal(got.seq_lens_cpu, expected.seq_lens_cpu));
    } else {
      EXPECT_EQ(got.seq_lens_sum, -1);
      EXPECT_TRUE(got.seq_lens_cpu.empty());
    }
    if (address != nullptr) {
      EXPECT_EQ(got.seq_lens.data(), address) << "graphs know it";
    }
    address = got.seq_lens.data();
  }
}

}  // namespace
}  // namespace folio::cuda_test
