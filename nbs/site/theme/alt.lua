-- The text in ![text](picture) describes the picture to those who don't see it, as in JupyterLab and on GitHub.
-- Quarto would print it below the picture. A text that is meant as a caption comes with `fig-alt` beside it.
function Image(img)
  if #img.caption > 0 and not img.attributes["fig-alt"] then
    img.attributes["fig-alt"] = pandoc.utils.stringify(img.caption)
    img.caption = {}
    return img
  end
end

-- What Pandoc made of a picture that is a paragraph of its own; its images have gone through the function above
function Figure(fig)
  local img = #fig.content == 1 and fig.content[1].content[1]
  if img and img.t == "Image" and #img.caption == 0 then return pandoc.Para(fig.content[1].content) end
end
