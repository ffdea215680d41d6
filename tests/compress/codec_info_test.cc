// Every codec's table is complete, true, and documented.
#include "compress/codec_info.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "compress/backend.h"

namespace thinwire {
namespace {

std::string ReadAll(const std::filesystem::path& path) {
  std::ostringstream text;
  text
      << std::ifstream(std::filesystem::path(THINWIRE_SOURCE_DIR) / path, std::ios::binary).rdbuf();
  return text.str();
}

// Ends in a full stop, and is one line of text.
bool IsSentence(const std::string& text) {
  return text.size() > 10 && text.back() == '.' && text.find('\n') == std::string::npos;
}

class CodecInfoTest : public testing::TestWithParam<size_t> {
 protected:
  const CodecTraits& traits_ = kCodecs[GetParam()];
  const CodecInfo& info_ = InfoOf(traits_.id);
  const CodecSpec standard_{.id = traits_.id};
  const std::string name_{traits_.name};
};

std::string NameOf(const testing::TestParamInfo<size_t>& info) {
  return std::string(kCodecs[info.param].name);
}
INSTANTIATE_TEST_SUITE_P(Of, CodecInfoTest, testing::Range(size_t{0}, kCodecs.size()), NameOf);

TEST_P(CodecInfoTest, IsTheTypesOwn) {
  EXPECT_EQ(info_.traits.name, traits_.name);
  EXPECT_EQ(info_.traits.id, traits_.id);
  EXPECT_TRUE(IsSentence(info_.help)) << info_.help;
}

TEST_P(CodecInfoTest, HasTheOperationsOfItsKindOnBothBackends) {
  for (const CodecOperations& codec : {info_.scalar, info_.simd}) {
    const bool entries = traits_.entries();
    EXPECT_EQ(codec.encode != nullptr, !entries);
    EXPECT_EQ(codec.decode != nullptr, !entries);
    EXPECT_EQ(codec.decode_add != nullptr, !entries);
    EXPECT_EQ(codec.heads != nullptr, traits_.widths());
    EXPECT_EQ(codec.begin != nullptr, traits_.widths());
    EXPECT_EQ(codec.encode_entries != nullptr, entries);
    EXPECT_EQ(codec.decode_entries != nullptr, entries);
    EXPECT_EQ(codec.add_entries != nullptr, entries);
  }
}

TEST_P(CodecInfoTest, ADefaultParsesToTheDefault) {
  EXPECT_EQ(standard_.ToString(), name_);
  for (const ParameterInfo* parameter : info_.parameters) {
    const std::string text = name_ + ":" + parameter->key + "=" + parameter->print(standard_);
    const absl::StatusOr<CodecSpec> spec = CodecSpec::Parse(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(*spec, standard_) << text;
    EXPECT_EQ(info_.FindParameter(parameter->key), parameter);
  }
  EXPECT_EQ(info_.FindParameter("nonsense"), nullptr);
}

TEST_P(CodecInfoTest, ParametersHaveWordsAndKeysOfTheirOwn) {
  std::set<std::string> keys;
  for (const ParameterInfo* parameter : info_.parameters) {
    EXPECT_TRUE(keys.insert(parameter->key).second) << parameter->key;
    EXPECT_STRNE(parameter->range, "") << parameter->key;
    EXPECT_TRUE(IsSentence(parameter->help)) << parameter->help;
  }
  EXPECT_EQ(keys.count("down"), 0u) << "down= is the pair's";
}

TEST_P(CodecInfoTest, ABadValueIsRefusedAndTheNearestIsTaken) {
  for (const ParameterInfo* parameter : info_.parameters) {
    for (const std::string value : {"", "nonsense", "-1", "1e400"}) {
      CodecSpec spec = standard_;
      const std::optional<std::string> nearest = parameter->parse(value, &spec);
      ASSERT_TRUE(nearest.has_value()) << parameter->key << "=" << value;
      EXPECT_EQ(spec, standard_) << "a refused value changed the spec";
      EXPECT_FALSE(parameter->parse(*nearest, &spec).has_value()) << *nearest;

      const absl::Status status =
          CodecSpec::Parse(name_ + ":" + parameter->key + "=" + value).status();
      for (const std::string& word : {std::string(parameter->range), *nearest}) {
        EXPECT_NE(status.message().find(word), absl::string_view::npos) << status;
      }
    }
  }
}

TEST_P(CodecInfoTest, EveryParameterIsInTheFormat) {
  const std::string format = ReadAll("compress/FORMAT.md");
  for (const ParameterInfo* parameter : info_.parameters) {
    const std::string row = "| " + std::string(parameter->key) + " | " + parameter->range + " | " +
                            parameter->print(standard_) + " |";
    EXPECT_NE(format.find(row), std::string::npos)
        << "the table of parameters in FORMAT.md lacks the row " << row;
  }
}

// The default codec of the second hop is one that has a second hop, or the codec itself.
TEST_P(CodecInfoTest, TheDefaultSecondHopIsASecondHop) {
  const CodecPair pair = *CodecPair::Parse(name_);
  if (traits_.entries()) {
    EXPECT_EQ(pair.down, pair.up);
  } else {
    EXPECT_FALSE(pair.down.traits().entries());
    EXPECT_TRUE(CodecPair::Parse(name_ + ":down=" + pair.down.ToString()).ok());
  }
  EXPECT_EQ(*CodecPair::Parse(pair.ToString()), pair);
}

TEST(CodecInfo, MomentumNeedsAreThoseOfTheMethods) {
  const auto need = [](const char* spec) { return CodecPair::Parse(spec)->momentum(); };
  EXPECT_EQ(need("int4"), MomentumNeed::kUnused);
  EXPECT_EQ(need("ternary"), MomentumNeed::kUnused);
  EXPECT_EQ(need("onebit"), MomentumNeed::kRequired);
  EXPECT_EQ(need("int8:down=onebit"), MomentumNeed::kRequired);
  EXPECT_EQ(need("topk"), MomentumNeed::kHelps);
  EXPECT_EQ(need("topk:density=0.0099"), MomentumNeed::kAdvised);
}

// The fused reductions are compared with the reference, which takes one rank after the other.
TEST(CodecInfo, TheReferenceHasNoFusedLoops) {
  // Mostly a server computes ternary's sums, adding one worker's push after the other.
  const std::set<std::string_view> unfused = {"topk", "adaptive", "ternary"};
  for (const CodecTraits& traits : kCodecs) {
    EXPECT_EQ(InfoOf(traits.id).scalar.reduce, nullptr) << traits.name;
    EXPECT_EQ(InfoOf(traits.id).simd.reduce == nullptr, unfused.contains(traits.name))
        << traits.name;
  }
}

}  // namespace
}  // namespace thinwire
